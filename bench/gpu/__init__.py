"""``make gpu-check``."""
