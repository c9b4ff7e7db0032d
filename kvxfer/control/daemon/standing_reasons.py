"""Why the daemon refuses work now: each reason is one of /readyz, one of a gauge, and a line of the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvxfer.log import logger

#: The kinds of reasons; docs/daemon.md explains them.
KINDS: Final = ("starting", "stopping", "draining", "transport", "agent", "store", "audit-log")


class StandingReasons:
    """Looks for reasons, and logs each kind of them when it comes, and when none is left.

    Parameters
    ----------
    find
        Returns the present reasons in words, by kind; at once, from what is known.
    """

    def __init__(self, find: Callable[[], Mapping[str, list[str]]]) -> None:
        self._find = find
        self._logged: frozenset[str] | None = None

    def look(self) -> Mapping[str, list[str]]:
        """Returns the present reasons; logs what has changed since the last look, once `begin` was called."""
        found = self._find()
        kinds = frozenset(found)
        if self._logged is not None and kinds != self._logged:
            if came := [words for kind in KINDS if kind in kinds - self._logged for words in found[kind]]:
                logger().warning("not ready: %s", "; ".join(came))
            elif not kinds:
                logger().info("ready")
            self._logged = kinds
        return found

    def begin(self) -> str:
        """Returns the first line about it, ``"ready"`` or why not, and logs changes from now on."""
        found = self.look()
        self._logged = frozenset(found)
        words = [words for kind in KINDS for words in found.get(kind, ())]
        return f"not ready: {'; '.join(words)}" if words else "ready"
