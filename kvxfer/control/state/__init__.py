"""What the daemon knows: pure tables, told the time, and the store that keeps some of it."""
