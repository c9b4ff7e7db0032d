"""The daemon's REST as Python."""
