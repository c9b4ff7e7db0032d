"""Decode's word for prompts that wait here for their turn: prefill is to keep them."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import kvxfer
from kvxfer.connectors.common.appointment import Appointment
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.mail import Mail
from kvxfer.connectors.common.notes import KEY_NBYTES, Claim, digest_of
from kvxfer.connectors.common.prefill_ranks import PrefillRanks
from kvxfer.connectors.common.step import Claimed

# Two of three may be late.
_TIMES: Final = 3
# A router's parameters say how often.
_LEAST_INTERVAL_S: Final = 0.05


@dataclass(slots=True)
class _Beat:
    """What is said of one request, and when again."""

    sessions: list[Future[kvxfer.Peer]]
    note: Claim
    interval_s: float
    due_at: float


class Claims:
    """What one worker says for its engine. Steps of the engine say it again, in time.

    Parameters
    ----------
    ranks, mail
        Of this worker.
    keep_s
        How long prefill is taken to keep what does not say so: this engine's own ``lease_ttl_s``.
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
        if (note := claim_of(source)) is None:
            return
        keep_s = source.keep_s if isinstance(source, Handover) else None
        interval_s = max((keep_s or self._keep_s) / _TIMES, _LEAST_INTERVAL_S)
        sessions = [self._ranks.session(rank, claimed.request_id) for rank in source.ranks]
        self._beats[claimed.request_id] = _Beat(sessions, note, interval_s, time.monotonic() + interval_s)
        for session in sessions:
            self._mail.send_over(session, note)

    def end(self, request_id: str) -> None:
        """Says no more of a request."""
        self._beats.pop(request_id, None)

    def beat(self) -> None:
        """Says again what is due. What cannot be reached is left to the fetch, which says why."""
        now = time.monotonic()
        for beat in self._beats.values():
            if beat.due_at <= now:
                beat.due_at = now + beat.interval_s
                for session in beat.sessions:
                    if session.done():
                        self._mail.send_over(session, beat.note)


def claim_of(source: Handover | Appointment, is_reading: bool = False) -> Claim | None:
    """Returns what claims a request; None where the engine that keeps it does not listen."""
    if isinstance(source, Appointment):
        return Claim(source.key, bytes(KEY_NBYTES), is_reading)
    if source.keep_s is None:
        return None
    return Claim(digest_of(source.request_id), digest_of(str(source.leases[0])), is_reading)
