"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterable

import pytest
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

# All that tests name; a build may have fewer (native/CMakeLists.txt has a line for each).
TRANSPORTS = {"cuda_ipc", "loopback", "shm", "tcp", "unix"}


def named(value: object) -> set[str]:
    """Transports that a parameter of a test, or what stands in it, names."""
    value = getattr(getattr(value, "options", value), "transports", value)
    if isinstance(value, str):
        return {value} & TRANSPORTS
    return set().union(*map(named, value)) if isinstance(value, tuple) else set()


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Leaves out tests of transports that this build does not have."""
    try:
        from kvxfer.session.transport_registry import kinds
    except ImportError:  # without the native module all that needs it is left out
        return
    lacking = TRANSPORTS - set(kinds())
    for item in items if lacking else ():
        of_test = [mark.args for mark in item.iter_markers("transports")]
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if missing := lacking & named((*of_test, *parameters)):
            item.add_marker(pytest.mark.skip(reason=f"this build has no {', '.join(sorted(missing))}"))
