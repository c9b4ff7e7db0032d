"""The machine's limit for a set of pages: the shortest code that can move them, in the same run.

Nothing of the engine takes part; pages and memory are of the same kind as of the transfer beside them.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from kvxfer.bench import _limits
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.run import memory, perftest, plain_loop
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.process import Worker
from kvxfer.bench.run.stats import median, median_ratio
from kvxfer.bench.work.page_data import PageFiller, Words, block_order, page_keys

#: What a limit's name stands for.
DESCRIPTIONS = {
    "shared-copy": "plain copy into memory shared with the peer",
    "shared-copy-nt": "the same with non-temporal stores",
    "process-vm-readv": "process_vm_readv, 1024 pages in a call",
    "tcp-stream": "one loopback TCP stream, writev and readv",
    "unix-stream": "one unix socket stream, writev and readv",
    "libfabric-loop": "a plain loop of libfabric's own reads over the same provider, polling",
    "ucx-loop": "a plain loop of UCX's own gets over its tcp, polling",
    "ib-read-bw": "perftest's ib_read_bw, READs of a page on the same device",
}
# Of (transport, kind of memory); the one that ratios are taken against first.
# With several threads: "shared-copy-nt:2".
_THREADED = "shared-copy-nt"
_LIMITS = {("shm", "pool"): ("shared-copy", "shared-copy-nt"), ("shm", "foreign"): ("process-vm-readv",)}
_PERFTEST = "ib-read-bw"
_LOOP = "-loop"
# Keys of the limit's pages begin with this, the transfer's with a request or an iteration.
_KEY_SPACE = 1 << 40


@dataclass(frozen=True, slots=True)
class LimitSpec:
    """What is moved, and how. ``names`` share one memory; they are run one after the other.

    ``device`` is the RDMA device, where that moves it.
    """

    names: tuple[str, ...]
    page_nbytes: int
    num_pages: int
    seed: int
    device: str = ""

    @property
    def nbytes(self) -> int:
        return self.page_nbytes * self.num_pages

    @property
    def is_stream(self) -> bool:
        return self.names[0].endswith("-stream")

    @property
    def is_program(self) -> bool:
        """Whether it is a program of its own, which brings its pages and both ends."""
        return self.names == (_PERFTEST,) or self.names[0].endswith(_LOOP)

    @property
    def is_shared(self) -> bool:
        return self.names[0].startswith("shared-copy")


def limits_for(transport: str, memory_kind: str) -> tuple[str, ...]:
    """Returns the limits of a transport, the one that ratios are taken against first.

    Of verbs that is perftest's where it is installed, of ucx and libfabric a loop of the library's own reads
    where its headers are: else a stream as for tcp.
    """
    if transport in ("ucx", "libfabric"):
        return (f"{transport}{_LOOP}",) if plain_loop.is_there(transport) else ("tcp-stream",)
    if transport == "verbs":
        return (_PERFTEST,) if perftest.is_installed() else ("tcp-stream",)
    return _LIMITS.get((transport, memory_kind), (f"{transport}-stream",))


def limit_of_threads(num_threads: int) -> str:
    """Returns the limit of so many threads that copy into memory shared with the peer."""
    return _THREADED if num_threads == 1 else f"{_THREADED}:{num_threads}"


class LimitSide:
    """Either end's part of a limit, in its process; `Limit` gives the commands."""

    _spec: LimitSpec
    _memory: NDArray[np.uint8]
    _stream: socket.socket | None = None

    def __init__(self, coordinator: Channel) -> None:
        self._descriptors = coordinator.descriptors

    def source(self, spec: Message) -> Message:
        """Makes this end the source."""
        self._open(spec, at_source=True)
        if not (self._spec.is_shared or self._spec.is_stream):
            memory.allow_readers()
        return {"address": memory.address_of(self._memory)}

    def destination(self, spec: Message, source_pid: int, address: int) -> None:
        """Makes this end the destination of a source's pages."""
        if LimitSpec(**spec).is_shared:
            self._source = memory.map_shared(self._descriptors.popleft(), LimitSpec(**spec).nbytes)
            address = memory.address_of(self._source)
        self._open(spec, at_source=False)
        self._from = source_pid, address
        self._src_offsets = self._offsets(self._order_of(at_source=True))

    def fill(self, iteration: int) -> None:
        """Writes the pages of one iteration."""
        self._filler.fill(self._rows, self._order, self._keys(iteration))

    def send(self) -> Message:
        """Sends them, where the limit is a stream."""
        assert self._stream is not None
        start_ns = time.monotonic_ns()
        address = memory.address_of(self._memory)
        _limits.send_pages(self._stream.fileno(), address, self._own_offsets, self._spec.page_nbytes)
        return {"start_ns": start_ns}

    def clear(self) -> None:
        self._memory[:] = 0

    def move(self, name: str) -> Message:
        """Moves all pages and returns how long it took; a stream also when its last byte was in."""
        to, nbytes = memory.address_of(self._memory), self._spec.page_nbytes
        if self._stream is not None:
            _limits.recv_pages(self._stream.fileno(), to, self._own_offsets, nbytes)
            return {"end_ns": time.monotonic_ns()}
        pid, address = self._from
        pages = (to, address, self._own_offsets, self._src_offsets, nbytes)
        if name == "process-vm-readv":
            return {"elapsed_ns": _limits.vm_readv_pages(pid, *pages)}
        kind, _, threads = name.partition(":")
        if kind == _THREADED:
            return {"elapsed_ns": _limits.copy_pages_nt(*pages, threads=int(threads or 1))}
        return {"elapsed_ns": _limits.copy_pages(*pages)}

    def check(self, iteration: int) -> None:
        wrong = self._filler.check(self._rows, self._order, self._keys(iteration))
        if wrong is not None:
            raise CheckFailedError(f"the limit {self._spec.names[0]} itself moved wrong bytes: {wrong}")

    def _open(self, fields: Message, *, at_source: bool) -> None:
        self._spec = spec = LimitSpec(**fields)
        if spec.is_shared:
            self._memory = memory.map_shared(self._descriptors.popleft(), spec.nbytes)
        else:
            self._memory = memory.allocate_private(spec.nbytes)
        if spec.is_stream:
            self._stream = socket.socket(fileno=self._descriptors.popleft())
        self._rows: Words = self._memory.view(np.uint64).reshape(spec.num_pages, -1)
        self._order = self._order_of(at_source=at_source)
        self._own_offsets = self._offsets(self._order)
        self._filler = PageFiller(spec.page_nbytes)

    def _order_of(self, *, at_source: bool) -> NDArray[np.uint32]:
        spec = self._spec
        return block_order(spec.num_pages, spec.seed + (not at_source))

    def _offsets(self, order: NDArray[np.uint32]) -> NDArray[np.uint64]:
        return order.astype(np.uint64) * np.uint64(self._spec.page_nbytes)

    def _keys(self, iteration: int) -> Words:
        return page_keys(_KEY_SPACE, iteration, num_pages=self._spec.num_pages)


class Limit:
    """The coordinator's view: sets the limit up in two workers, and runs it."""

    def __init__(self, spec: LimitSpec, source: Worker, destination: Worker) -> None:
        self._source, self._destination = source, destination
        self.spec = spec
        #: name -> elapsed times of the runs so far, in order
        self.elapsed_ns: dict[str, list[int]] = {name: [] for name in spec.names}
        if spec.is_program:
            return
        src_pass, dst_pass = _resources(spec)
        try:
            found = source.call("limit.source", descriptors=src_pass, spec=asdict(spec))
            destination.call(
                "limit.destination",
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
        if self.spec.is_program:
            self.elapsed_ns[self.spec.names[0]].append(self._run_program())
            return
        for turn in range(len(self.spec.names)):
            # Neither of two limits always runs on the warmer machine.
            name = self.spec.names[(turn + iteration) % len(self.spec.names)]
            self._source.call("limit.fill", iteration=iteration)
            self._destination.call("limit.clear")
            self._destination.send("limit.move", name=name)
            if self.spec.is_stream:
                start_ns = self._source.call("limit.send")["start_ns"]
                elapsed_ns = self._destination.reply()["end_ns"] - start_ns
            else:
                elapsed_ns = self._destination.reply()["elapsed_ns"]
            self.elapsed_ns[name].append(elapsed_ns)
            self._destination.call("limit.check", iteration=iteration)

    def _run_program(self) -> int:
        spec = self.spec
        if spec.names == (_PERFTEST,):
            rate = perftest.read_rate(spec.device, spec.page_nbytes, spec.num_pages)
            return round(spec.nbytes / rate)
        transport = spec.names[0].removesuffix(_LOOP)
        return plain_loop.elapsed_ns(transport, spec.page_nbytes, spec.num_pages)

    def forget(self) -> None:
        """Drops the times so far, as those of a warm-up."""
        for times in self.elapsed_ns.values():
            times.clear()

    def rates(self, name: str) -> list[float]:
        """Returns GB/s of each run of ``name``."""
        return [self.spec.nbytes / elapsed_ns for elapsed_ns in self.elapsed_ns[name]]

    def figures(self, rates: list[float] | None = None) -> Message:
        """Returns what a result says of the limit and, beside the rates of as many runs, the ratios to it.

        ``limit_nt`` is what the same machine does with stores that bypass the caches.
        """
        found: Message = {}
        for key, name in zip(("limit", "limit_nt"), self.spec.names, strict=False):
            if name not in DESCRIPTIONS:  # of several threads: beside rows of its own
                continue
            its = self.rates(name)
            found[key] = {"name": name, "gb_per_s": median(its)}
            if rates is not None:
                found[f"{key}_ratio"] = median_ratio(rates, its)
        return found


def _resources(spec: LimitSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the descriptors for the source and for the destination; the caller closes them."""
    if spec.is_shared:
        src, dst = (memory.create_shared(spec.nbytes, f"kvxfer-limit-{end}") for end in ("src", "dst"))
        return (src,), (src, dst)
    if spec.is_stream:
        ours, theirs = stream_pair(spec.names[0].removesuffix("-stream"))
        return (ours.detach(),), (theirs.detach(),)
    return (), ()


def stream_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a unix socket stream, or of a TCP stream over the loopback network."""
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for stream in (ours, theirs):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs
