"""Prefill's side of one request at one rank: writes chunks into the pages that decode has named."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import kvxfer
from kvxfer.connectors.common.ending import quiesce
from kvxfer.connectors.sglang.control_messages import Destination

_log = logging.getLogger("kvxfer")

_PENDING: Final = kvxfer.TransferState.PENDING


@dataclass(slots=True)
class Target:
    """A decode rank that receives a request; SGLang's code keeps it for each room.

    Attributes
    ----------
    destination
        The pages that it named.
    peer
        Its session; None if this rank writes nothing to it.
    regions
        Its regions by name.
    """

    destination: Destination
    peer: kvxfer.Peer | None = None
    regions: dict[str, kvxfer.RegionDescriptor] = field(default_factory=dict)

    @property
    def is_dummy(self) -> bool:
        return self.destination.is_dummy

    @property
    def endpoint(self) -> str:
        return self.destination.endpoint

    @property
    def dst_port(self) -> int:
        return self.destination.dst_port

    @property
    def required_dst_info_num(self) -> int:
        return self.destination.required_dst_info_num

    @property
    def decode_prefix_len(self) -> int:
        return self.destination.decode_prefix_len


class Delivery:
    """The writes of one request. All methods may be called from any thread.

    Attributes
    ----------
    num_pages, nbytes
        The posted pages of keys and values, and all posted bytes.
    began_ns, ended_ns
        The time of the first posting and of the last end so far, by CLOCK_MONOTONIC.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_pages = 0
        self.nbytes = 0
        self.began_ns = 0
        self.ended_ns = 0
        self.rails: set[str] = set()
        self._lock = threading.Lock()
        self._pending: list[tuple[kvxfer.Transfer, kvxfer.Peer]] = []
        self._is_whole = False
        self._failure = ""

    @property
    def failure(self) -> str:
        """Why the request failed; "" while it has not."""
        return self._failure

    @property
    def is_quiet(self) -> bool:
        """Whether no page of the request is read any more."""
        self._look()
        return not self._pending

    @property
    def is_between_chunks(self) -> bool:
        """Whether no write is pending but more chunks will follow."""
        return self.is_quiet and not self._is_whole

    @property
    def is_done(self) -> bool:
        """Whether all of the request is in decode's pages."""
        self._look()
        return self._is_whole and not self._pending and not self._failure

    def post(
        self, peer: kvxfer.Peer, write: Callable[[], kvxfer.Transfer], num_blocks: int, nbytes: int
    ) -> None:
        """Posts one write to a peer, unless the request has failed."""
        with self._lock:
            if self._failure:
                return
            transfer = write()
            self._pending.append((transfer, peer))
            self.num_pages += num_blocks
            self.nbytes += nbytes
            self.began_ns = self.began_ns or transfer.stages.posted_ns

    def close(self) -> None:
        """Marks that all writes of the request are posted."""
        self._is_whole = True

    def fail(self, reason: str) -> None:
        """Stops posting and cancels pending writes; the first reason stays."""
        with self._lock:
            self._failure = self._failure or reason
            pending = list(self._pending)
        for transfer, _ in pending:
            transfer.cancel()

    def quiesce(self, patience_s: float) -> None:
        """Returns when no page is read any more; ends sessions that do not let go in time."""
        with self._lock:
            pending = list(self._pending)
        if pending:
            peers = dict.fromkeys(peer for _, peer in pending)
            quiesce(kvxfer.Group([transfer for transfer, _ in pending]), peers, patience_s)
            self._look()

    def _look(self) -> None:
        """Drops writes that have ended; if one failed, fails the request with its error."""
        if not self._pending:
            return
        error: kvxfer.KvxferError | None = None
        with self._lock:
            ended = [transfer for transfer, _ in self._pending if transfer.state is not _PENDING]
            if not ended:
                return
            self._pending = [pair for pair in self._pending if pair[0] not in ended]
            for transfer in ended:
                self.ended_ns = max(self.ended_ns, transfer.stages.ended_ns)
                self.rails.update(transfer.rails)
                error = error or transfer.error
        if error is not None:
            self.fail(str(error))
