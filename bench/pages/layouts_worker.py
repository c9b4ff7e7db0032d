"""The two worker processes of ``kvxfer bench pages`` with layouts: source ranks, and a destination."""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvxfer
from kvxfer.bench.pages.layouts import LayoutPagesOptions
from kvxfer.bench.pages.pieces import PieceDestination, PieceSource
from kvxfer.bench.run import memory
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import AgentEnd, limit_commands
from kvxfer.bench.run.process import serve
from kvxfer.bench.work.rank_cache import RankCache, RankSpec
from kvxfer.plan.sharding import Share

# Longer than any run: the lease of reads is not what is measured.
_LEASE_S = 3600.0
_DESTINATION = -1
_PLAIN = "plain"


class LayoutEnd(AgentEnd):
    """What both ends share: regions of an agent, their block tables, and the shares that move."""

    def __init__(self, name: str, options: LayoutPagesOptions, coordinator: Channel, remote: tuple[str, ...]):
        super().__init__(name, options.transport, remote)
        self.options = options
        self.work = options.work
        self.coordinator = coordinator
        self.data = self.work.data()
        self._cpu_ns = 0
        # The plain copy: all of a cache like the destination's.
        every = Share(0, 0, self.work.dst.layers, self.work.dst.heads, self.work.src_nbytes)
        self.shares = {"moved": self.work.shares, _PLAIN: (every,)}
        self.dst_blocks = self.work.blocks(self.work.dst, _DESTINATION)
        self.src_blocks = {src: self.work.blocks(spec, src) for src, spec in self.work.srcs.items()}
        #: Of the source of the plain copy.
        self.plain_blocks = self.work.blocks(self.work.plain, _DESTINATION - 1)

    def register(self, name: str, spec: RankSpec) -> RankCache:
        """Makes a region of a rank's cache."""
        if self.options.memory == "pool":
            pool = kvxfer.Pool(1, spec.nbytes, name=name)
            space: NDArray[np.uint8] = pool.array(spec.nbytes)
            self.page_kind = pool.page_kind
        else:
            space = memory.allocate_private(spec.nbytes)
            self.page_kind = memory.private_kind(space)
        cache = spec.place(space)
        self.agent.register(name, cache.memory, cache.layout)
        return cache

    def names(self, what: str, share: Share) -> tuple[str, str]:
        """Returns the regions of a share at the source and at the destination."""
        return (_PLAIN, _PLAIN) if what == _PLAIN else (_source_name(share.src), "kv")

    def blocks_of(self, what: str, share: Share) -> NDArray[np.uint32]:
        """Returns the block table of a share's source."""
        return self.plain_blocks if what == _PLAIN else self.src_blocks[share.src]

    def post(self, verb: str, what: str, **more: Any) -> tuple[list[kvxfer.Transfer], int]:
        """Posts every share by ``agent.write`` or ``agent.read``; returns them and when that began."""
        ours, theirs = self.agent.regions, self.peer.regions
        work = []
        for share in self.shares[what]:
            names = self.names(what, share)
            mine, its = names if verb == "write" else names[::-1]
            work.append((ours[mine], theirs[its], self.blocks_of(what, share), share))
        self.start_cpu()
        start_ns = time.monotonic_ns()
        return [
            getattr(self.agent, verb)(
                region,
                remote,
                src_blocks=blocks,
                dst_blocks=self.dst_blocks,
                layers=share.layers,
                heads=share.heads,
                timeout_s=self.options.timeout_s,
                **more,
            )
            for region, remote, blocks, share in work
        ], start_ns

    def start_cpu(self) -> None:
        self._cpu_ns = time.process_time_ns()

    def cpu_ns(self) -> int:
        """Processor time of all threads since ``start_cpu``."""
        return time.process_time_ns() - self._cpu_ns

    def wait(self, transfers: list[kvxfer.Transfer], start_ns: int) -> Message:
        """Waits for what this end posted since `start_ns`."""
        post_ns = time.monotonic_ns() - start_ns
        for transfer in transfers:
            transfer.wait(self.options.timeout_s)
        total_ns = time.monotonic_ns() - start_ns
        rails = sorted({rail for transfer in transfers for rail in transfer.rails})
        return {"total_ns": total_ns, "post_ns": post_ns, "cpu_ns": self.cpu_ns(), "rails": rails}


class LayoutSource(LayoutEnd):
    """All source ranks that the destination needs, each a region of one agent."""

    _pieces: PieceSource | None = None

    def __init__(self, options: LayoutPagesOptions, coordinator: Channel) -> None:
        super().__init__("source", options, coordinator, ("kv", _PLAIN))
        self.caches = {src: self.register(_source_name(src), spec) for src, spec in self.work.srcs.items()}
        self.plain = self.register(_PLAIN, self.work.plain)
        self._leases: list[kvxfer.Lease] = []

    def handlers(self) -> dict[str, Any]:
        return {
            **super().handlers(),
            "fill": self.fill,
            "write": self.write,
            "serve_begin": self.serve_begin,
            "serve_end": self.serve_end,
            "pieces": self.set_pieces,
            "send_pieces": self.send_pieces,
        }

    def fill(self) -> Message:
        """Writes the sequence into every rank, once: transfers leave it as it is."""
        for src, cache in self.caches.items():
            self.data.fill(cache, self.src_blocks[src])
        self.data.as_bytes().fill(self.plain, self.plain_blocks)
        return {}

    def write(self, what: str, iteration: int) -> Message:
        return self.wait(*self.post("write", what, notify=_tag(what, iteration)))

    def serve_begin(self) -> Message:
        """From here the progress thread serves a read; this one waits for the coordinator."""
        if not self._leases:
            self._leases = [
                region.grant(self.peer, mode="read", ttl_s=_LEASE_S) for region in self.agent.regions.values()
            ]
        self.start_cpu()
        return {}

    def serve_end(self) -> Message:
        return {"cpu_ns": self.cpu_ns()}

    def set_pieces(self) -> Message:
        """Makes ready to send piece by piece, over the stream that came with the command."""
        stream = socket.socket(fileno=self.coordinator.descriptors.popleft())
        self._pieces = PieceSource(
            stream, self.work, self.caches, self.src_blocks, self.plain, self.dst_blocks
        )
        return self._pieces.described()

    def send_pieces(self) -> Message:
        assert self._pieces is not None, "pieces comes first"
        return self._pieces.send()


class LayoutDestination(LayoutEnd):
    """One destination rank: expects its sequence, or reads it; checks it."""

    _pieces: PieceDestination | None = None

    def __init__(self, options: LayoutPagesOptions, coordinator: Channel) -> None:
        sources = tuple(_source_name(src) for src in options.work.srcs)
        super().__init__("destination", options, coordinator, (*sources, _PLAIN))
        self.caches = {
            "moved": self.register("kv", self.work.dst),
            _PLAIN: self.register(_PLAIN, self.work.plain),
        }

    def handlers(self) -> dict[str, Any]:
        return {
            **super().handlers(),
            "clear": self.clear,
            "expect": self.expect,
            "read": self.read,
            "check": self.check,
            "pieces": self.set_pieces,
            "recv_pieces": self.recv_pieces,
            "check_pieces": self.check_pieces,
        }

    def clear(self, what: str) -> Message:
        self.caches[what].memory[:] = 0
        return {}

    def expect(self, what: str, iteration: int) -> Message:
        region = self.agent.regions["kv" if what == "moved" else _PLAIN]
        self.start_cpu()
        incoming = self.agent.expect(
            _tag(what, iteration), self.dst_blocks, region, timeout_s=self.options.timeout_s
        )
        self.coordinator.send("reply")
        incoming.wait(self.options.timeout_s)
        return {"cpu_ns": self.cpu_ns(), "rails": list(incoming.rails)}

    def read(self, what: str) -> Message:
        return self.wait(*self.post("read", what))

    def check(self, what: str, layer: int, corrupt: bool) -> Message:
        """Compares the elements of one layer, or of all where it is -1; ``corrupt`` flips a bit before."""
        cache, layers = self.caches[what], None if layer < 0 else range(layer, layer + 1)
        if corrupt:
            first = 0 if layer < 0 else layer - cache.spec.layers.start
            cache.part(first, 0)[self.dst_blocks[0], 0, 0, 0] ^= 1
        data = self.data if what == "moved" else self.data.as_bytes()
        return {"wrong": data.check(cache, self.dst_blocks, layers)}

    def set_pieces(self, stream_nbytes: int) -> Message:
        """Makes ready to receive piece by piece; they go where the plain copy goes, too."""
        stream = socket.socket(fileno=self.coordinator.descriptors.popleft())
        self._pieces = PieceDestination(stream, self.caches[_PLAIN], stream_nbytes)
        return {}

    def recv_pieces(self) -> Message:
        assert self._pieces is not None, "pieces comes first"
        return self._pieces.receive()

    def check_pieces(self, layers: int, tokens: int) -> Message:
        """Compares all that was sent piece by piece."""
        wanted = self.work.dst.layers[:layers]
        return {"wrong": self.data.as_bytes().check(self.caches[_PLAIN], self.dst_blocks, wanted, tokens)}


def _source_name(src: int) -> str:
    return f"rank{src}"


def _tag(what: str, iteration: int) -> bytes:
    return b"%s-%d" % (what.encode(), iteration)


async def run(fields: Message, coordinator: Channel, role: str) -> None:
    """Serves as one of the two ends until the coordinator ends."""
    options = LayoutPagesOptions(**fields)
    kind = LayoutSource if role == "layout-source" else LayoutDestination
    async with kind(options, coordinator) as end:
        await serve(coordinator, {**end.handlers(), **limit_commands(coordinator)})
