"""``kvxfer bench serving``."""
