"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A failure prints the seed and the example; the database would only be a second source of truth.
# No example is too slow on a machine that has other things to do.
settings.register_profile(
    "kvxfer", database=None, print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvxfer")

# Whoever is started in the background by a shell without job control is to ignore Ctrl-C, and so is all
# that it starts. Tests of Ctrl-C need one that is heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
