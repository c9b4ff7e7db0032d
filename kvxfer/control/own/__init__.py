"""The daemon's own agents, for clients that have none."""
