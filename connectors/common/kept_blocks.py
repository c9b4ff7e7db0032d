"""Prefill's side at a worker: blocks of finished requests, kept until decode has fetched them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvxfer
from kvxfer.connectors.common.notes import Receipt, digest_of
from kvxfer.connectors.common.paging import pages_of
from kvxfer.connectors.common.place import is_among

if TYPE_CHECKING:
    from kvxfer.connectors.common.regions import CacheRegions
    from kvxfer.connectors.common.statistics import Recorder
    from kvxfer.connectors.common.step import Grant

_log = logging.getLogger("kvxfer")


@dataclass(slots=True)
class _Kept:
    request_id: str
    leases: list[kvxfer.Lease]
    first_lease: bytes
    holder: str | None
    expires_at: float
    readers: set[int] = field(default_factory=set)
    is_released: bool = False  # all have read, or time is over
    is_finished: bool = False  # the engine said that the request is


class KeptBlocks:
    """What this worker keeps for readers.

    Parameters
    ----------
    ttl_s
        How long blocks are kept for readers that do not come.
    statistics
        Told of receipts, and of requests that were kept in vain.
    """

    def __init__(self, ttl_s: float, statistics: Recorder) -> None:
        self._ttl_s = ttl_s
        self._statistics = statistics
        self._kept: dict[bytes, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def grant(self, grant: Grant, regions: CacheRegions) -> None:
        """Lets the grant's holder read the blocks by its tokens."""
        first_lease = digest_of(str(grant.leases[0]))
        expires_at = time.monotonic() + self._ttl_s
        kept = _Kept(grant.request_id, [], first_lease, grant.holder, expires_at)
        self._kept[digest_of(grant.request_id)] = kept
        for at, group in enumerate(regions.groups):
            pages = pages_of(grant.tables[group.table], regions.pages_per_block[at])
            if len(held := pages[pages != 0]):
                token = group.lease(grant.leases[group.table])
                region = regions.regions[at]
                kept.leases.append(region.grant(grant.holder, held, ttl_s=self._ttl_s, token=token))

    def withdraw(self, request_id: str) -> None:
        """Takes back what was granted for a request that nobody was told of."""
        if (kept := self._kept.pop(digest_of(request_id), None)) is not None:
            _revoke(kept)

    def note(self, receipt: Receipt, sender: str | None = None) -> None:
        """Takes in that a reader is done.

        Parameters
        ----------
        sender
            The name of its agent; None for this worker itself.
        """
        kept = self._kept.get(receipt.request)
        # The lease tells the request's own readers from a peer that guesses names.
        if (
            kept is not None
            and kept.first_lease == receipt.first_lease
            and (sender is None or kept.holder is None or is_among(sender, kept.holder))
            and receipt.reader < receipt.num_readers
        ):
            kept.readers.add(receipt.reader)
            self._statistics.received()
            kept.is_released = kept.is_released or len(kept.readers) >= receipt.num_readers

    def collect(self, finished_request_ids: set[str]) -> set[str]:
        """Returns requests whose blocks the engine may use again; each once."""
        if not self._kept:
            return set()
        for request_id in finished_request_ids:
            if (finished := self._kept.get(digest_of(request_id))) is not None:
                finished.is_finished = True
        now = time.monotonic()
        given_back = set()
        for key, kept in list(self._kept.items()):
            if not kept.is_released and kept.expires_at <= now:
                kept.is_released = True
                self._statistics.expired()
                _log.warning(
                    "kvxfer: request %s: not all of its readers came within %g s (lease_ttl_s); its blocks "
                    "are given back",
                    kept.request_id,
                    self._ttl_s,
                )
            if kept.is_released and kept.is_finished:
                # The fence: who still reads finds out before it can say that it has the bytes.
                _revoke(self._kept.pop(key))
                given_back.add(kept.request_id)
        return given_back

    def let_go(self) -> None:
        """Ends every lease, since the blocks lose their bytes; the engine has them back as they are due."""
        for kept in self._kept.values():
            _revoke(kept)
            kept.leases.clear()
            kept.is_released = True

    def close(self) -> None:
        """Takes back everything."""
        for kept in self._kept.values():
            _revoke(kept)
        self._kept.clear()


def _revoke(kept: _Kept) -> None:
    for lease in kept.leases:
        lease.revoke_blocking()
