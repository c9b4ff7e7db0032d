"""What the daemon knows: pure tables, which get the time as an argument, and the store of durable state."""
