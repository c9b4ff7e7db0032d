"""Decode's side at a worker: prompts that were computed elsewhere, on their way into this cache."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

import kvxfer
from kvxfer.connectors.vllm.handover import Handover
from kvxfer.connectors.vllm.kept_blocks import receipt
from kvxfer.connectors.vllm.place import Place
from kvxfer.connectors.vllm.prefill_ranks import PrefillRanks
from kvxfer.connectors.vllm.regions import CacheRegions, pages_of
from kvxfer.connectors.vllm.settings import Settings
from kvxfer.connectors.vllm.step import FetchOrder

_log = logging.getLogger("kvxfer")

_NO_IDS: Final = np.empty(0, np.uint32)
_MAX_KNOWN_SHARES: Final = 1024


@dataclass(slots=True)
class _Fetch:
    order: FetchOrder
    dial_until: float
    sessions: list[Future[kvxfer.Peer]] = field(default_factory=list)
    transfers: list[tuple[int, kvxfer.Transfer]] = field(default_factory=list)  # with their group
    is_posted: bool = False  # all of its transfers are
    failure: str = ""

    def fail(self, why: str) -> None:
        """Ends what is under way; the first reason stays."""
        self.failure = self.failure or why
        for _, transfer in self.transfers:
            if transfer.state == "pending":
                transfer.cancel()


class Fetches:
    """What this worker fetches.

    No thread waits for anything: the engine's own steps ask how far it has come.

    Parameters
    ----------
    agent, regions, place
        Of this worker.
    settings
        Its deadlines.
    """

    def __init__(self, agent: kvxfer.Agent, regions: CacheRegions, place: Place, settings: Settings) -> None:
        self._agent = agent
        self._regions = regions
        self._reader = place.tp_rank
        self._num_readers = place.tp_size
        self._settings = settings
        self._ranks = PrefillRanks(agent)
        self._fetches: dict[str, _Fetch] = {}
        self._shares: dict[tuple[int, tuple[int, ...]], tuple[kvxfer.Share, ...]] = {}

    def begin(self, order: FetchOrder) -> None:
        """Starts one; a session that is open already is read from at once."""
        fetch = _Fetch(order, time.monotonic() + self._settings.connect_timeout_s)
        self._fetches[order.request_id] = fetch
        if isinstance(order.handover, str):
            fetch.fail(order.handover)
            return
        fetch.sessions = [self._ranks.session(rank) for rank in order.handover.ranks]
        self._advance(fetch)

    def abandon(self, request_id: str) -> None:
        """Stops one whose request has ended; it is still collected, when nothing can land any more."""
        if (fetch := self._fetches.get(request_id)) is not None:
            fetch.fail("the request ended")

    def collect(self) -> tuple[set[str], dict[str, set[int]]]:
        """Returns requests whose fetch has ended, and of those that failed the blocks that lack bytes.

        Blocks of failed requests are of the first cache group. Each request is returned once.
        """
        ended: set[str] = set()
        failed: dict[str, set[int]] = {}
        for request_id, fetch in list(self._fetches.items()):
            if not self._advance(fetch):
                continue
            del self._fetches[request_id]
            ended.add(request_id)
            if fetch.failure:
                failed[request_id] = self._missing(fetch)
                _log.warning("kvxfer: request %s: cache not loaded: %s", request_id, fetch.failure)
            if isinstance(fetch.order.handover, Handover):
                self._release(fetch.order.handover, fetch.sessions)
        return ended, failed

    def release(self, handover: Handover) -> None:
        """Tells every prefill rank that this worker does not need a request's blocks."""
        self._release(handover, [self._ranks.session(rank) for rank in handover.ranks])

    def close(self) -> None:
        """Stops everything; returns when nothing can land any more."""
        for fetch in self._fetches.values():
            fetch.fail("the engine shuts down")
            for _, transfer in fetch.transfers:
                try:
                    transfer.wait(self._settings.load_timeout_s)
                except (kvxfer.KvxferError, TimeoutError):
                    pass  # it ended, or the agent's close ends it
        self._fetches.clear()
        self._ranks.close()

    # ---- one fetch ----------------------------------------------------------------------------

    def _advance(self, fetch: _Fetch) -> bool:
        """Takes a fetch as far as it goes now; returns whether it has ended."""
        if not fetch.is_posted and not fetch.failure:
            if all(session.done() for session in fetch.sessions):
                try:
                    self._post(fetch)
                    fetch.is_posted = True
                except kvxfer.KvxferError as error:
                    fetch.fail(str(error))
                except Exception as error:
                    # What came from outside may surprise us; it must not end the engine.
                    _log.exception("kvxfer: request %s: cannot be fetched", fetch.order.request_id)
                    fetch.fail(f"{type(error).__name__}: {error}")
            elif time.monotonic() > fetch.dial_until:
                fetch.fail(f"no session within {self._settings.connect_timeout_s:g} s (connect_timeout_s)")
            else:
                return False
        for _, transfer in fetch.transfers:
            if transfer.state in ("failed", "cancelled"):
                fetch.fail(str(transfer.error))
        return all(transfer.state != "pending" for _, transfer in fetch.transfers)

    def _post(self, fetch: _Fetch) -> None:
        order = fetch.order
        assert isinstance(order.handover, Handover)
        peers = [session.result() for session in fetch.sessions]
        for group, region in enumerate(self._regions.regions):
            src, dst, tokens = self._pages(order, order.handover, group)
            if not len(dst):
                continue
            remotes = [_region_of(peer, region.name) for peer in peers]
            for share in self._shares_of(group, region, remotes):
                transfer = self._agent.read(
                    region,
                    remotes[share.src],
                    src,
                    dst,
                    layers=share.layers,
                    heads=share.heads,
                    tokens=tokens,
                    timeout_s=self._settings.load_timeout_s,
                    lease=order.handover.leases[group],
                )
                fetch.transfers.append((group, transfer))

    def _pages(
        self, order: FetchOrder, handover: Handover, group: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], range | None]:
        """Returns which pages come from which, and of pages of unlike size the tokens that are missing."""
        ratio = self._regions.pages_per_block[group]
        src_ratio = handover.pages_per_block[group]
        page_tokens = self._regions.groups[group].block_size // ratio
        src = pages_of(handover.tables[group], src_ratio)
        dst = pages_of(order.tables[group], ratio)
        if handover.block_sizes[group] // src_ratio != page_tokens:
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
            if len(self._shares) >= _MAX_KNOWN_SHARES:
                self._shares.clear()  # of engines that came and went
            self._shares[key] = shares
        return shares

    def _missing(self, fetch: _Fetch) -> set[int]:
        order = fetch.order
        if fetch.is_posted:
            ratio = self._regions.pages_per_block[0]
            pages = [
                int(page)
                for group, transfer in fetch.transfers
                if group == 0 and transfer.state != "done"
                for page in transfer.failed_blocks
            ]
            if pages:
                return {page // ratio for page in pages}
        block_size = self._regions.groups[0].block_size
        return set(order.tables[0][order.first_token // block_size :]) - {0}

    def _release(self, handover: Handover, sessions: list[Future[kvxfer.Peer]]) -> None:
        note = receipt(handover.request_id, handover.leases[0], self._reader, self._num_readers)
        for session in sessions:
            # Called at once where the session is there, else by who dials: the engine may step no more.
            session.add_done_callback(lambda session: self._send(session, note))

    def _send(self, session: Future[kvxfer.Peer], note: bytes) -> None:
        try:
            peer = session.result()
            remote = _region_of(peer, self._regions.receipts.name)
            self._agent.read(self._regions.receipts, remote, _NO_IDS, _NO_IDS, notify=note)
        except Exception as error:
            # It is gone and its blocks with it, or the lease's time gives them back.
            _log.debug("kvxfer: a receipt was not sent: %s", error)


def _region_of(peer: kvxfer.Peer, name: str) -> kvxfer.RegionDescriptor:
    remote = peer.regions.get(name)
    if remote is None:
        raise kvxfer.UsageError(
            f"{peer.name} has no region {name}: both engines run one model with one kind of cache manager",
            code="unknown-region",
            peer=peer.name,
        )
    return remote
