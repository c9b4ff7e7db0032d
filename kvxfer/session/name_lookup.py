"""Looks up names in an agent's directory, within the caller's deadline even if the directory hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvxfer.address import is_without_scheme
from kvxfer.errors import KvxferError, PeerError, invalid

if TYPE_CHECKING:
    from kvxfer.directory import Directory, Entry

# Longest single call to a directory, so that a caller that gave up is noticed soon.
_ASK_S: Final = 1.0
# Most look-ups that a directory without answers can block; further ones wait until their own deadlines.
_MOST_AT_ONCE: Final = 32


class NameLookup:
    """Looks names up for one agent.

    Parameters
    ----------
    directory
        The agent's; None for none.
    """

    def __init__(self, directory: Directory | None) -> None:
        self._directory = directory
        self._turns = threading.BoundedSemaphore(_MOST_AT_ONCE)

    def check(self, name: str) -> None:
        """Raises `UsageError` if there is no directory for looking up a name."""
        if self._directory is None:
            if is_without_scheme(name):
                raise invalid(f"{name!r} looks like a host and a port: write 'tcp://{name}'")
            raise invalid(
                f"{name!r} is a name without an address, and this agent has no directory to look it up in: "
                'pass Agent(..., directory=...), or connect to an address ("tcp://host:port")'
            )

    def look_up(self, name: str, left_s: Callable[[], float], is_given_up: Callable[[], bool]) -> Entry:
        """Returns the entry of `name`. Called on a thread; its caller waits no longer than `left_s`.

        Raises
        ------
        PeerError
            ``unreachable``: the name is not in the directory, or the directory does not answer.
        """
        assert self._directory is not None, "check() comes first"
        if not self._turns.acquire(timeout=left_s()):
            raise _unreachable(name, f"{_MOST_AT_ONCE} other look-ups wait for the directory")
        try:
            while True:
                ask_s, begun = min(left_s(), _ASK_S), time.monotonic()
                try:
                    return self._directory.resolve_blocking(name, ask_s)
                except PeerError:
                    # An error before the time is over has another reason.
                    if is_given_up() or not left_s() or time.monotonic() - begun < ask_s:
                        raise
        except KvxferError:
            raise
        except Exception as error:
            raise _unreachable(name, f"the directory raised {type(error).__name__}: {error}") from error
        finally:
            self._turns.release()


def _unreachable(name: str, why: str) -> PeerError:
    return PeerError(f"{name!r} cannot be looked up: {why}", code="unreachable", peer=name)
