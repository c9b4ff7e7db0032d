"""Prefill's side at a worker: keeps the blocks of finished requests until decode has fetched them."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import kvxfer
from kvxfer.connectors.common.ending import has_ended, revoke
from kvxfer.connectors.common.notes import Heartbeat, Receipt, digest_of
from kvxfer.connectors.common.paging import counted, pages_of
from kvxfer.connectors.common.readers import Readers
from kvxfer.connectors.common.step import News
from kvxfer.connectors.common.worker_rank import agents_of

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
    readers: Readers
    ttl_s: float
    expires_at: float
    is_read: bool = False  # all known readers have read; others may come while it is kept
    is_released: bool = False  # no more readers are expected, time is over, or no lease could be granted
    is_finished: bool = False  # the engine has reported the request as finished


class KeptBlocks:
    """The requests that this worker keeps for readers.

    Parameters
    ----------
    ttl_s, return_ttl_s
        How long blocks are kept for readers that do not come: the blocks of a prompt, and the blocks of a
        request that was decoded here. Each claim from a reader's engine restarts the time.
    statistics
        Counts receipts, and requests that expired or gave way.
    """

    def __init__(self, ttl_s: float, return_ttl_s: float, statistics: Recorder) -> None:
        self._ttl_s = ttl_s
        self._return_ttl_s = return_ttl_s
        self._statistics = statistics
        self._kept: dict[bytes, _Kept] = {}
        self._withdrawn: list[kvxfer.Lease] = []
        self._news = News()
        self._read: set[str] = set()  # fully read and perhaps shared; not yet reported to the scheduler half

    def __len__(self) -> int:
        return len(self._kept)

    def grant(self, grant: Grant, regions: CacheRegions) -> None:
        """Grants leases on the blocks, with the grant's tokens, to its readers.

        If that fails, the log says why, readers find no lease, and `collect` returns the finished request.
        """
        first_lease = digest_of(str(grant.leases[0]))
        ttl_s = self._return_ttl_s if grant.is_return else self._ttl_s
        readers = Readers(grant.readers)
        kept = _Kept(grant.request_id, [], first_lease, readers, ttl_s, time.monotonic() + ttl_s)
        # A lease can name one holder only. With several readers, the token alone is the right to read.
        holder = agents_of(grant.readers[0]) if len(grant.readers) == 1 else None
        self._kept[digest_of(grant.request_id)] = kept
        try:
            for at, group in enumerate(regions.groups):
                pages = pages_of(grant.tables[group.table], regions.pages_per_block[at])
                if len(held := pages[pages != 0]):
                    token = group.lease(grant.leases[group.table])
                    region = regions.regions[at]
                    held = counted(held, region.layout, regions.pages_per_block[at])
                    # No expiry: `collect` revokes the lease before the blocks are reused, and heartbeats may
                    # extend the time until then.
                    kept.leases.append(region.grant(holder, held, ttl_s=math.inf, token=token))
        except kvxfer.KvxferError as error:
            _log.warning("kvxfer: request %s cannot be read by other engines: %s", grant.request_id, error)
            kept.is_released = True

    def withdraw(self, request_id: str) -> None:
        """Begins to revoke the leases of a request that was never announced to a reader; see `settle`."""
        if (kept := self._kept.pop(digest_of(request_id), None)) is not None:
            self._withdrawn += [lease for lease in kept.leases if not has_ended(lease)]

    def settle(self) -> None:
        """Returns when no block of a withdrawn request is read any more."""
        withdrawn, self._withdrawn = self._withdrawn, []
        revoke(withdrawn)

    def note(self, receipt: Receipt, sender: str, is_own: bool = False) -> None:
        """Processes the receipt of a reader that is done.

        Parameters
        ----------
        sender
            The name of the reader's agent.
        is_own
            Whether the reader is this worker itself.
        """
        kept = self._kept_of(receipt, sender, is_own)
        if kept is None:
            return
        kept.readers.read(sender, receipt.reader, receipt.num_readers)
        self._statistics.received()
        if not kept.readers.are_done:
            return
        kept.is_read = True
        if receipt.may_be_shared and not kept.readers.are_named:
            self._read.add(kept.request_id)
        else:
            kept.is_released = True

    def claim(self, heartbeat: Heartbeat, sender: str) -> None:
        """Processes a heartbeat: the reader's engine knows the request, and will read it or is reading it."""
        kept = self._kept_of(heartbeat, sender)
        if kept is not None and not kept.is_released:
            kept.readers.came(sender)
            kept.is_read = kept.readers.are_done
            # It resets the count of reads at the scheduler half, so a finished read is reported again.
            (self._read.add if kept.is_read else self._read.discard)(kept.request_id)
            kept.expires_at = time.monotonic() + kept.ttl_s
            names = frozenset({kept.request_id})
            self._news |= News(names, names if heartbeat.is_reading else frozenset())

    def take_news(self) -> News:
        """Returns the news from readers' engines since the last call."""
        news = replace(self._news, read=tuple(sorted(self._read)))
        self._news = News()
        self._read.clear()
        return news

    def give_way(self, request_id: str) -> None:
        """Releases a request, because other requests need its blocks."""
        kept = self._kept.get(digest_of(request_id))
        if kept is not None and not kept.is_released:
            kept.is_released = True
            if not kept.is_read:
                self._statistics.gave_way()

    def _kept_of(self, note: Receipt | Heartbeat, sender: str, is_own: bool = False) -> _Kept | None:
        """Returns the request that a note names, if the sender is one of its readers."""
        kept = self._kept.get(note.request)
        # The lease's digest proves that the sender did not merely guess the request's name.
        if kept is None or kept.first_lease != note.first_lease:
            return None
        return kept if is_own or kept.readers.may_be(sender) else None

    def collect(self, finished_request_ids: set[str]) -> set[str]:
        """Returns the requests whose blocks the engine may reuse; each once."""
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
                if not kept.is_read:
                    self._statistics.expired()
                    _log.warning(
                        "kvxfer: request %s: not all of its readers finished within %g s; its blocks are "
                        "given back",
                        kept.request_id,
                        kept.ttl_s,
                    )
            if kept.is_released and kept.is_finished:
                # The fence: a read that is still running fails instead of reporting the bytes as done. A copy
                # that a GPU has begun goes on; a later call then returns the request.
                kept.leases = [lease for lease in kept.leases if not has_ended(lease)]
                if not kept.leases:
                    del self._kept[key]
                    given_back.add(kept.request_id)
        return given_back

    def let_go(self) -> None:
        """Ends every lease, because the blocks lose their bytes; `collect` returns the requests as usual."""
        revoke(lease for kept in self._kept.values() for lease in kept.leases)
        for kept in self._kept.values():
            kept.leases.clear()
            kept.is_released = True

    def close(self) -> None:
        """Revokes every lease."""
        revoke(lease for kept in self._kept.values() for lease in kept.leases)
        self._kept.clear()
