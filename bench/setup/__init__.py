"""``kvxfer bench setup``."""
