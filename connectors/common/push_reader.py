"""One decode worker that reads a push: its registration, and the writes to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import kvxfer
from kvxfer.connectors.common.ending import is_quiet_by
from kvxfer.connectors.common.push_registration import Registration


@dataclass(slots=True)
class Reader:
    """A decode worker of one push.

    Attributes
    ----------
    registration
        None if the reader wants nothing, or has failed.
    posted
        For each group, the tokens whose writes have been posted.
    writes
        Writes that are pending, failed or cancelled.
    failure
        Why the reader does not get its request; "" until then.
    """

    peer: kvxfer.Peer
    registration: Registration | None
    posted: list[int] = field(default_factory=list)
    writes: kvxfer.Group = field(default_factory=lambda: kvxfer.Group([]))
    failure: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the reader has everything or has failed, and no write to it is pending."""
        state = self.writes.state
        if state is kvxfer.TransferState.PENDING:
            return False
        if self.registration is None or self.failure:
            return True
        # A write may have failed since the last check (`Pushes._look_after`), so require success.
        return state is kvxfer.TransferState.DONE and all(
            posted >= self.registration.num_tokens for posted in self.posted
        )

    def took(self, writes: Iterable[kvxfer.Transfer]) -> None:
        """Adds posted writes, and drops those that are done."""
        self.writes = kvxfer.Group([*(each for each in self.writes.members if not each.succeeded), *writes])

    def fail(self, why: str) -> None:
        """Cancels its writes; the first reason stays."""
        self.failure = self.failure or why
        self.writes.cancel()

    def is_quiet_by(self, deadline: float) -> bool:
        """Waits until no page is read for it; returns whether that came in time."""
        return is_quiet_by(self.writes, deadline)
