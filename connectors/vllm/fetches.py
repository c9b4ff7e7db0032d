"""Decode's side at a worker: prompts that were computed elsewhere, on their way into this cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

import kvxfer
from kvxfer.connectors.vllm.handouts import receipt
from kvxfer.connectors.vllm.prefill_ranks import PrefillRanks
from kvxfer.connectors.vllm.regions import CacheRegions, pages_of
from kvxfer.connectors.vllm.step import FetchOrder

_log = logging.getLogger("kvxfer")

_NO_IDS: Final = np.empty(0, np.uint32)


@dataclass(slots=True)
class _Fetch:
    order: FetchOrder
    sessions: list[Future[kvxfer.Peer]] = field(default_factory=list)
    posted: bool = False
    transfers: list[tuple[int, kvxfer.Transfer]] = field(default_factory=list)  # with their group
    failure: str = ""


class Fetches:
    """What this worker fetches.

    No thread waits for anything: the engine's own steps ask how far it has come.

    Parameters
    ----------
    agent, regions
        Of this worker.
    reader, num_readers
        Which of the decode engine's workers this is, and how many there are.
    timeout_s
        Of one fetch.
    """

    def __init__(
        self, agent: kvxfer.Agent, regions: CacheRegions, reader: int, num_readers: int, timeout_s: float
    ) -> None:
        self._agent = agent
        self._regions = regions
        self._reader = reader
        self._num_readers = num_readers
        self._timeout_s = timeout_s
        self._ranks = PrefillRanks(agent)
        self._fetches: dict[str, _Fetch] = {}
        self._shares: dict[tuple[int, tuple[int, ...]], tuple[kvxfer.Share, ...]] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def begin(self, order: FetchOrder) -> None:
        """Starts one; a session that is open already is read from at once."""
        fetch = _Fetch(order, failure=order.refusal)
        self._fetches[order.request_id] = fetch
        if not fetch.failure:
            fetch.sessions = [self._ranks.session(rank) for rank in order.ranks]
        self._advance(fetch)

    def abandon(self, request_id: str) -> None:
        """Stops one whose request has ended; it is still collected, when nothing can land any more."""
        if (fetch := self._fetches.get(request_id)) is not None:
            fetch.failure = fetch.failure or "the request ended"
            _cancel(fetch)

    def collect(self) -> tuple[set[str], dict[str, set[int]]]:
        """Returns requests whose fetch has ended, and of those that failed the blocks that lack bytes.

        Blocks of failed requests are of cache group 0. Each request is returned once.
        """
        ended: set[str] = set()
        failed: dict[str, set[int]] = {}
        for request_id, fetch in list(self._fetches.items()):
            if not self._advance(fetch):
                continue
            del self._fetches[request_id]
            if fetch.order.dst_tables:
                ended.add(request_id)
                if fetch.failure:
                    failed[request_id] = self._missing(fetch)
                    _log.warning(
                        "kvxfer: request %s: its cache was not loaded: %s", request_id, fetch.failure
                    )
            self._release(fetch)
        return ended, failed

    def close(self) -> None:
        """Stops everything; returns when nothing can land any more."""
        for fetch in self._fetches.values():
            _cancel(fetch)
            for _, transfer in fetch.transfers:
                try:
                    transfer.wait(self._timeout_s)
                except (kvxfer.KvxferError, TimeoutError):
                    pass  # it ended, or the agent's close ends it
        self._fetches.clear()
        self._ranks.close()

    # ---- one fetch ----------------------------------------------------------------------------

    def _advance(self, fetch: _Fetch) -> bool:
        """Takes a fetch as far as it goes now; returns whether it has ended."""
        if not fetch.posted:
            if not all(session.done() for session in fetch.sessions):
                return False
            fetch.posted = True
            if not fetch.failure and fetch.order.dst_tables:
                try:
                    self._post(fetch)
                except kvxfer.KvxferError as error:
                    fetch.failure = str(error)
                    _cancel(fetch)
        pending = False
        for _, transfer in fetch.transfers:
            state = transfer.state
            pending = pending or state == "pending"
            if state in ("failed", "cancelled") and not fetch.failure:
                fetch.failure = str(transfer.error)
                _cancel(fetch)
        return not pending

    def _post(self, fetch: _Fetch) -> None:
        order = fetch.order
        peers = [session.result() for session in fetch.sessions]
        for group, region in enumerate(self._regions.regions):
            remotes = []
            for peer in peers:
                if (remote := peer.regions.get(region.name)) is None:
                    raise kvxfer.UsageError(
                        f"{peer.name} has no region {region.name}: both engines run one model with one "
                        "kind of cache manager",
                        code="unknown-region",
                    )
                remotes.append(remote)
            src, dst, tokens = self._pages(order, group)
            if not len(dst):
                continue
            for share in self._shares_of(group, region, remotes):
                transfer = self._agent.read(
                    region,
                    remotes[share.src],
                    src,
                    dst,
                    layers=share.layers,
                    heads=share.heads,
                    tokens=tokens,
                    timeout_s=self._timeout_s,
                    lease=order.leases[group],
                )
                fetch.transfers.append((group, transfer))

    def _pages(
        self, order: FetchOrder, group: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], range | None]:
        """Returns which pages come from which, and of pages of unlike size the tokens that are missing."""
        ratio = self._regions.pages_per_block[group]
        src_ratio = order.src_pages_per_block[group]
        page_tokens = self._regions.groups[group].block_size // ratio
        src = pages_of(order.src_tables[group], src_ratio)
        dst = pages_of(order.dst_tables[group], ratio)
        if order.src_block_sizes[group] // src_ratio != page_tokens:
            return src, dst, range(order.first_token, order.num_tokens)
        first, stop = order.first_token // page_tokens, -(-order.num_tokens // page_tokens)
        src, dst = src[first:stop], dst[first:stop]
        both = (src != 0) & (dst != 0)
        return src[both], dst[both], None

    def _shares_of(
        self, group: int, region: kvxfer.Region, remotes: list[kvxfer.RegionDescriptor]
    ) -> tuple[kvxfer.Share, ...]:
        """Returns which ranks serve this one; what several hold is spread over this engine's workers."""
        key = group, tuple(remote.peer_id for remote in remotes)
        shares = self._shares.get(key)
        if shares is None:
            load = [float((at - self._reader) % len(remotes)) for at in range(len(remotes))]
            shares = kvxfer.route([remote.layout for remote in remotes], [region.layout], load)
            if len(self._shares) >= 1024:
                self._shares.clear()  # of engines that came and went
            self._shares[key] = shares
        return shares

    def _missing(self, fetch: _Fetch) -> set[int]:
        order = fetch.order
        if not fetch.transfers:
            block_size = self._regions.groups[0].block_size
            return set(order.dst_tables[0][order.first_token // block_size :]) - {0}
        ratio = self._regions.pages_per_block[0]
        pages: Iterable[int] = (
            int(page)
            for group, transfer in fetch.transfers
            if group == 0 and transfer.state != "done"
            for page in transfer.failed_blocks
        )
        return {page // ratio for page in pages}

    def _release(self, fetch: _Fetch) -> None:
        """Tells every prefill rank that this worker is done with the request's blocks."""
        order = fetch.order
        if not order.leases:
            return
        note = receipt(order.remote_request_id, order.leases[0], self._reader, self._num_readers)
        for session in fetch.sessions:
            if session.exception() is not None:
                continue
            peer = session.result()
            try:
                remote = peer.regions[self._regions.receipts.name]
                self._agent.read(self._regions.receipts, remote, _NO_IDS, _NO_IDS, notify=note)
            except (kvxfer.KvxferError, KeyError):
                pass  # it is gone, and its blocks with it; else the lease's time gives them back


def _cancel(fetch: _Fetch) -> None:
    for _, transfer in fetch.transfers:
        if transfer.state == "pending":
            transfer.cancel()
