"""What every benchmark runs on: processes, their channel, an agent at each end, the machine's limit."""
