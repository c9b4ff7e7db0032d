"""``kvxfer bench parking``: pages into the daemon's pool, and out of it."""
