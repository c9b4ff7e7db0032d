"""``kvxfer bench plan``, and instructions for each page."""
