"""Prefill's side of one request at one rank: chunks that are written into the pages that decode has named."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import kvxfer
from kvxfer.connectors.common.quiescence import quiesce
from kvxfer.connectors.sglang.control_messages import Destination

_log = logging.getLogger("kvxfer")

_PENDING: Final = kvxfer.TransferState.PENDING


@dataclass(slots=True)
class Target:
    """A decode rank that a request goes to, as SGLang's code keeps it for each room.

    Attributes
    ----------
    destination
        What it named.
    peer
        Its session; None of one that this rank brings nothing.
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
        That were posted, of keys and values, and of all.
    began_ns, ended_ns
        The first posting and the last end so far, of CLOCK_MONOTONIC.
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
        """Why it failed; "" while it has not."""
        return self._failure

    @property
    def is_quiet(self) -> bool:
        """Whether none of its pages is read any more."""
        self._look()
        return not self._pending

    @property
    def is_between_chunks(self) -> bool:
        """Whether nothing is under way, and more is to come."""
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
        """Says that everything of the request is posted."""
        self._is_whole = True

    def fail(self, reason: str) -> None:
        """Posts nothing more and cancels what is under way; the first reason stays."""
        with self._lock:
            self._failure = self._failure or reason
            pending = list(self._pending)
        for transfer, _ in pending:
            transfer.cancel()

    def quiesce(self, patience_s: float) -> None:
        """Returns when none of its pages is read any more, at the cost of sessions if need be."""
        with self._lock:
            pending = list(self._pending)
        if pending:
            peers = dict.fromkeys(peer for _, peer in pending)
            quiesce(kvxfer.Group([transfer for transfer, _ in pending]), peers, patience_s)
            self._look()

    def _look(self) -> None:
        """Forgets writes that have ended; what one of them failed with ends the others."""
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
