"""``kvxfer bench latency``; triggers and command rings."""
