"""Prefill's side at a worker: blocks of finished requests, kept until decode has fetched them."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field

import kvxfer
from kvxfer.connectors.vllm.regions import CacheRegions, pages_of
from kvxfer.connectors.vllm.step import Grant

_log = logging.getLogger("kvxfer")


@dataclass(slots=True)
class _Handout:
    leases: list[kvxfer.Lease]
    key: str
    expires_at: float
    readers: set[int] = field(default_factory=set)
    ended: bool = False  # all have read, or time is over
    finished: bool = False  # the engine said that the request is


def receipt(request_id: str, lease: int, reader: int, num_readers: int) -> bytes:
    """Returns the notification by which a reader says that it is done with a request."""
    return json.dumps([request_id, f"{lease:x}", reader, num_readers]).encode()


class Handouts:
    """What this worker keeps for readers.

    Parameters
    ----------
    agent
        Its agent; this is the one reader of its notifications.
    ttl_s
        How long blocks are kept for readers that do not come.
    """

    def __init__(self, agent: kvxfer.Agent, ttl_s: float) -> None:
        self._agent = agent
        self._ttl_s = ttl_s
        self._handouts: dict[str, _Handout] = {}
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._handouts)

    def grant(self, grant: Grant, regions: CacheRegions) -> None:
        """Lets whoever names the leases read the blocks."""
        leases = []
        for group, (lease, table) in enumerate(zip(grant.leases, grant.tables, strict=True)):
            pages = pages_of(table, regions.pages_per_block[group])
            if len(held := pages[pages != 0]):
                region = regions.regions[group]
                leases.append(region.grant(None, held, ttl_s=self._ttl_s, lease_id=lease))
        self._handouts[grant.request_id] = _Handout(
            leases, f"{grant.leases[0]:x}", time.monotonic() + self._ttl_s
        )

    def withdraw(self, request_id: str) -> None:
        """Takes back what was granted for a request that nobody was told of."""
        if (handout := self._handouts.pop(request_id, None)) is not None:
            _revoke(handout)

    def collect(self, finished_request_ids: set[str]) -> set[str]:
        """Returns requests whose blocks the engine may use again; each once."""
        for request_id in finished_request_ids & self._handouts.keys():
            self._handouts[request_id].finished = True
        if not self._handouts:
            while self._agent.poll_notification() is not None:
                pass  # of a request whose time is over
            return set()
        while (note := self._agent.poll_notification()) is not None:
            self._read(note)
        now = time.monotonic()
        given_back = set()
        for request_id, handout in self._handouts.items():
            if not handout.ended and handout.expires_at <= now:
                handout.ended = True
                self.num_expired += 1
                _log.warning(
                    "kvxfer: request %s: nobody fetched its blocks within %g s (lease_ttl_s); "
                    "they are given back",
                    request_id,
                    self._ttl_s,
                )
            if handout.ended and handout.finished:
                given_back.add(request_id)
        for request_id in given_back:
            # The fence: who still reads finds out before it can say that it has the bytes.
            _revoke(self._handouts.pop(request_id))
        return given_back

    def _read(self, note: kvxfer.Notification) -> None:
        try:
            request_id, key, reader, num_readers = json.loads(note.payload)
            handout = self._handouts.get(request_id)
            # The key tells the request's own readers from a peer that guesses names.
            if handout is None or handout.key != key or not 0 <= int(reader) < int(num_readers):
                return
        except (ValueError, TypeError):
            _log.warning("kvxfer: %s sent a notification that is no receipt", note.peer.name)
            return
        handout.readers.add(int(reader))
        handout.ended = handout.ended or len(handout.readers) >= int(num_readers)

    def close(self) -> None:
        """Takes back everything."""
        for handout in self._handouts.values():
            _revoke(handout)
        self._handouts.clear()


def _revoke(handout: _Handout) -> None:
    for lease in handout.leases:
        lease.revoke()
