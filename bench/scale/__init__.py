"""``kvxfer bench scale``."""
