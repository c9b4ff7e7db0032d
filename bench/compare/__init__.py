"""``kvxfer bench compare``."""
