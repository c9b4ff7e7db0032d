"""``kvxfer bench handover``."""
