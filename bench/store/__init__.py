"""``kvxfer bench store``: pages from memory into a directory's files, and back."""
