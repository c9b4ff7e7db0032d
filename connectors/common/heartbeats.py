"""Heartbeats that decode sends to prefill, which keeps the prompts that wait for their turn here."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import kvxfer
from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.mail import Mail
from kvxfer.connectors.common.notes import KEY_NBYTES, Heartbeat, digest_of
from kvxfer.connectors.common.prefill_ranks import PrefillRanks
from kvxfer.connectors.common.step import Claimed

# Heartbeats per keep time: two of three may be lost or late.
_TIMES: Final = 3
# Bounds the rate, because the interval comes from a router's parameters.
_LEAST_INTERVAL_S: Final = 0.05


@dataclass(slots=True)
class _Beat:
    """The heartbeat of one request, and when it is due again."""

    sessions: list[Future[kvxfer.Peer]]
    note: Heartbeat
    interval_s: float
    due_at: float


class Heartbeats:
    """The heartbeats that one worker sends for its engine; the engine's steps repeat them in time.

    Parameters
    ----------
    ranks, mail
        Of this worker.
    keep_s
        The keep time to assume if a request's parameters name none: this engine's own ``lease_ttl_s``.
    """

    def __init__(self, ranks: PrefillRanks, mail: Mail, keep_s: float) -> None:
        self._ranks = ranks
        self._mail = mail
        self._keep_s = keep_s
        self._beats: dict[str, _Beat] = {}

    def __len__(self) -> int:
        return len(self._beats)

    def begin(self, claimed: Claimed) -> None:
        """Claims a request at each of prefill's ranks, until it `end`s."""
        source = claimed.source
        if (note := heartbeat_of(source)) is None:
            return
        keep_s = source.keep_s if isinstance(source, Handover) else None
        interval_s = max((keep_s or self._keep_s) / _TIMES, _LEAST_INTERVAL_S)
        sessions = [self._ranks.session(rank, claimed.request_id) for rank in source.ranks]
        self._beats[claimed.request_id] = _Beat(sessions, note, interval_s, time.monotonic() + interval_s)
        for session in sessions:
            self._mail.send_over(session, note)

    def end(self, request_id: str) -> None:
        """Stops claiming a request."""
        self._beats.pop(request_id, None)

    def beat(self) -> None:
        """Sends the heartbeats that are due. The fetch reports engines that cannot be reached."""
        now = time.monotonic()
        for beat in self._beats.values():
            if beat.due_at <= now:
                beat.due_at = now + beat.interval_s
                for session in beat.sessions:
                    if session.done():
                        self._mail.send_over(session, beat.note)


def heartbeat_of(source: Handover | ExpectedPush, is_reading: bool = False) -> Heartbeat | None:
    """Returns the note that claims a request; None if the engine that keeps it knows none."""
    if isinstance(source, ExpectedPush):
        return Heartbeat(source.key, bytes(KEY_NBYTES), is_reading)
    if source.keep_s is None:
        return None
    return Heartbeat(digest_of(source.request_id), digest_of(str(source.leases[0])), is_reading)
