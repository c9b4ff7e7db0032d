"""Memory that processes without an agent hand over."""
