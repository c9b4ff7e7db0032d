"""One decode worker that is pushed a request: what it asked for, and what is on its way to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import kvxfer
from kvxfer.connectors.common.push_registration import Registration
from kvxfer.connectors.common.quiescence import is_quiet_by, quiesce


@dataclass(slots=True)
class Reader:
    """A decode worker of one push.

    Attributes
    ----------
    registration
        None of one that wants nothing.
    posted
        Tokens of each group that are written, or on their way.
    writes
        On their way, or ended otherwise than well.
    failure
        Why it does not get what it asked for; "" as long as it may.
    """

    peer: kvxfer.Peer
    registration: Registration | None
    posted: list[int] = field(default_factory=list)
    writes: kvxfer.Group = field(default_factory=lambda: kvxfer.Group([]))
    failure: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it has all it registered for, or will never have it; no write of it is under way."""
        state = self.writes.state
        if state is kvxfer.TransferState.PENDING:
            return False
        if self.registration is None or self.failure:
            return True
        # One that failed since it was looked after is not what was registered for.
        return state is kvxfer.TransferState.DONE and all(
            posted >= self.registration.num_tokens for posted in self.posted
        )

    def took(self, writes: Iterable[kvxfer.Transfer]) -> None:
        """Takes in what was posted for it, and forgets what is done."""
        self.writes = kvxfer.Group([*(each for each in self.writes.members if not each.succeeded), *writes])

    def fail(self, why: str) -> None:
        """Stops writing to it; the first reason stays."""
        self.failure = self.failure or why
        self.writes.cancel()

    def is_quiet_by(self, deadline: float) -> bool:
        """Waits until nothing is read for it, and returns whether that came in time."""
        return is_quiet_by(self.writes, deadline)

    def quiesce(self, patience_s: float) -> None:
        """Returns when nothing is read for it any more, at the cost of its session if need be."""
        quiesce(self.writes, (self.peer,), patience_s)
