"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# A failure prints the seed and the example; the database would only be a second source of truth.
settings.register_profile("kvxfer", database=None, print_blob=True)
settings.load_profile("kvxfer")
