"""``kvxfer bench pages``."""
