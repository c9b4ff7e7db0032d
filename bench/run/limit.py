"""The machine's limit for a set of pages: the shortest code that can move them, in the same run.

Nothing of the engine takes part. The pages have the same size, number and order as the transfer
that is measured beside them, and lie in memory of the same kind.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.bench import _limits
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.run import memory
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.process import Worker
from kvxfer.bench.run.stats import GIB
from kvxfer.bench.work.page_data import PageFiller, Words, block_order, page_keys

#: What a limit's name stands for.
DESCRIPTIONS = {
    "shared-copy": "plain copy into memory shared with the peer",
    "shared-copy-nt": "the same with non-temporal stores",
    "process-vm-readv": "process_vm_readv, 1024 pages a call",
    "tcp-stream": "one loopback TCP stream, writev and readv",
    "unix-stream": "one unix socket stream, writev and readv",
}
# Keys of the limit's pages begin with this, the transfer's with a request or an iteration.
_KEY_SPACE = 1 << 40


@dataclass(frozen=True, slots=True)
class LimitSpec:
    """What is moved, and how. ``names`` share one memory; they are run one after the other."""

    names: tuple[str, ...]
    page_nbytes: int
    num_pages: int
    pattern: str
    seed: int

    @property
    def nbytes(self) -> int:
        return self.page_nbytes * self.num_pages

    @property
    def is_stream(self) -> bool:
        return self.names[0].endswith("-stream")

    @property
    def is_shared(self) -> bool:
        return self.names[0].startswith("shared-copy")


def limits_for(transport: str, memory_kind: str) -> tuple[str, ...]:
    """Returns the limits of a transport, the one that ratios are taken against first."""
    if transport == "tcp":
        return ("tcp-stream",)
    if transport == "unix":
        return ("unix-stream",)
    if transport == "shm":
        return ("shared-copy", "shared-copy-nt") if memory_kind == "pool" else ("process-vm-readv",)
    raise BenchError(f"unknown transport {transport!r}; known are shm, unix, tcp")


class LimitSource:
    """The source's part, in its process. Its methods are commands of the coordinator."""

    def __init__(self, spec: LimitSpec, descriptors: Callable[[], int]) -> None:
        """``descriptors`` returns the next descriptor that came with the command."""
        self._spec = spec
        self._memory = (
            memory.map_shared(descriptors(), spec.nbytes)
            if spec.is_shared
            else memory.allocate_private(spec.nbytes)
        )
        self._stream = socket.socket(fileno=descriptors()) if spec.is_stream else None
        self._order = block_order(spec.pattern, spec.num_pages, spec.seed)
        self._filler = PageFiller(spec.page_nbytes)
        if not (spec.is_shared or spec.is_stream):
            memory.allow_readers()

    def address(self) -> Message:
        return {"address": memory.address_of(self._memory)}

    def close(self) -> None:
        """Ends the stream, where there is one."""
        if self._stream is not None:
            self._stream.close()

    def fill(self, iteration: int) -> Message:
        """Writes the pages of one iteration."""
        keys = page_keys(_KEY_SPACE, iteration, num_pages=self._spec.num_pages)
        self._filler.fill(_rows(self._memory, self._spec), self._order, keys)
        return {}

    def send(self) -> Message:
        """Sends them, where the limit is a stream."""
        assert self._stream is not None
        start_ns = time.monotonic_ns()
        offsets = _offsets(self._order, self._spec)
        _limits.send_pages(
            self._stream.fileno(), memory.address_of(self._memory), offsets, self._spec.page_nbytes
        )
        return {"start_ns": start_ns}


class LimitDestination:
    """The destination's part, in its process."""

    def __init__(
        self, spec: LimitSpec, descriptors: Callable[[], int], source_pid: int, address: int
    ) -> None:
        self._spec = spec
        self._pid = source_pid
        self._source_address = address
        if spec.is_shared:
            self._source = memory.map_shared(descriptors(), spec.nbytes)
            self._source_address = memory.address_of(self._source)
            self._memory = memory.map_shared(descriptors(), spec.nbytes)
        else:
            self._memory = memory.allocate_private(spec.nbytes)
        self._stream = socket.socket(fileno=descriptors()) if spec.is_stream else None
        src_order = block_order(spec.pattern, spec.num_pages, spec.seed)
        self._order = block_order(spec.pattern, spec.num_pages, spec.seed + 1)
        self._src_offsets = _offsets(src_order, spec)
        self._dst_offsets = _offsets(self._order, spec)
        self._filler = PageFiller(spec.page_nbytes)

    def close(self) -> None:
        """Ends the stream, where there is one."""
        if self._stream is not None:
            self._stream.close()

    def clear(self) -> Message:
        self._memory[:] = 0
        return {}

    def move(self, name: str) -> Message:
        """Moves all pages and returns how long it took; a stream also when its last byte was in."""
        address, nbytes = memory.address_of(self._memory), self._spec.page_nbytes
        if self._stream is not None:
            _limits.recv_pages(self._stream.fileno(), address, self._dst_offsets, nbytes)
            return {"end_ns": time.monotonic_ns()}
        pair = (self._dst_offsets, self._src_offsets, nbytes)
        if name == "process-vm-readv":
            elapsed_ns = _limits.vm_readv_pages(self._pid, address, self._source_address, *pair)
        elif name == "shared-copy-nt":
            elapsed_ns = _limits.copy_pages_nt(address, self._source_address, *pair)
        else:
            elapsed_ns = _limits.copy_pages(address, self._source_address, *pair)
        return {"elapsed_ns": elapsed_ns}

    def check(self, iteration: int) -> Message:
        keys = page_keys(_KEY_SPACE, iteration, num_pages=self._spec.num_pages)
        wrong = self._filler.check(_rows(self._memory, self._spec), self._order, keys)
        if wrong is not None:
            raise CheckFailedError(f"the limit {self._spec.names[0]} itself moved wrong bytes: {wrong}")
        return {}


class Limit:
    """The coordinator's view: sets the limit up in two workers, and runs it."""

    def __init__(self, spec: LimitSpec, source: Worker, destination: Worker) -> None:
        self._source, self._destination = source, destination
        self.spec = spec
        #: name -> elapsed times of the runs so far, in order
        self.elapsed_ns: dict[str, list[int]] = {name: [] for name in spec.names}
        src_pass, dst_pass = _resources(spec)
        try:
            found = source.call("limit_source", descriptors=src_pass, spec=asdict(spec))
            destination.call(
                "limit_destination",
                descriptors=dst_pass,
                spec=asdict(spec),
                source_pid=source.pid,
                address=found["address"],
            )
        finally:
            for descriptor in {*src_pass, *dst_pass}:
                os.close(descriptor)

    def run(self, iteration: int) -> None:
        """Fills, moves and checks once by each of the names, and keeps the times."""
        for turn in range(len(self.spec.names)):
            # Neither of two limits always runs on the warmer machine.
            name = self.spec.names[(turn + iteration) % len(self.spec.names)]
            self._source.call("limit_fill", iteration=iteration)
            self._destination.call("limit_clear")
            self._destination.channel.send("limit_move", name=name)
            if self.spec.is_stream:
                start_ns = self._source.call("limit_send")["start_ns"]
                elapsed_ns = self._destination.reply()["end_ns"] - start_ns
            else:
                elapsed_ns = self._destination.reply()["elapsed_ns"]
            self.elapsed_ns[name].append(elapsed_ns)
            self._destination.call("limit_check", iteration=iteration)

    def forget(self) -> None:
        """Drops the times so far, as those of a warm-up."""
        for times in self.elapsed_ns.values():
            times.clear()

    def rates(self, name: str) -> list[float]:
        """Returns GB/s of each run of ``name``."""
        return [self.spec.nbytes / elapsed_ns for elapsed_ns in self.elapsed_ns[name]]


class LimitCommands:
    """The commands of a worker that takes part in limits, as either end."""

    def __init__(self, descriptors: Callable[[], int]) -> None:
        self._descriptors = descriptors
        self._source: LimitSource | None = None
        self._destination: LimitDestination | None = None

    def handlers(self) -> dict[str, Callable[..., Message]]:
        return {
            "limit_source": self._set_source,
            "limit_destination": self._set_destination,
            "limit_fill": lambda **fields: self._as_source().fill(**fields),
            "limit_send": lambda: self._as_source().send(),
            "limit_clear": lambda: self._as_destination().clear(),
            "limit_move": lambda **fields: self._as_destination().move(**fields),
            "limit_check": lambda **fields: self._as_destination().check(**fields),
        }

    def _set_source(self, spec: Message) -> Message:
        self._source = LimitSource(_spec(spec), self._descriptors)
        return self._source.address()

    def _set_destination(self, spec: Message, **fields: Any) -> Message:
        self._destination = LimitDestination(_spec(spec), self._descriptors, **fields)
        return {}

    def _as_source(self) -> LimitSource:
        assert self._source is not None, "limit_source comes first"
        return self._source

    def _as_destination(self) -> LimitDestination:
        assert self._destination is not None, "limit_destination comes first"
        return self._destination


def _spec(fields: Message) -> LimitSpec:
    return LimitSpec(**{**fields, "names": tuple(fields["names"])})


def _rows(array: NDArray[np.uint8], spec: LimitSpec) -> Words:
    return array.view(np.uint64).reshape(spec.num_pages, spec.page_nbytes // 8)


def _offsets(order: NDArray[np.uint32], spec: LimitSpec) -> NDArray[np.uint64]:
    return order.astype(np.uint64) * np.uint64(spec.page_nbytes)


def _resources(spec: LimitSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the descriptors for the source and for the destination; the caller closes them."""
    if spec.is_shared:
        src = memory.create_shared(spec.nbytes, "kvxfer-limit-src")
        dst = memory.create_shared(spec.nbytes, "kvxfer-limit-dst")
        return (src,), (src, dst)
    if spec.names[0] == "unix-stream":
        ours, theirs = socket.socketpair()
        return (ours.detach(),), (theirs.detach(),)
    if spec.names[0] == "tcp-stream":
        ours, theirs = loopback_stream()
        return (ours.detach(),), (theirs.detach(),)
    return (), ()


def loopback_stream() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a TCP stream over the loopback network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for stream in (ours, theirs):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def pages_within(page_nbytes: int, num_pages: int, most_nbytes: int = GIB // 4) -> int:
    """Returns how many of ``num_pages`` a limit moves so that it stays within ``most_nbytes``."""
    return max(1, min(num_pages, most_nbytes // page_nbytes))
