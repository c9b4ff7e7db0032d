"""The two worker processes of ``kvxfer bench pages``: a source, and a destination that checks what it got."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench import _limits
from kvxfer.bench.pages.measure import MOVED, PLAIN, PagesOptions
from kvxfer.bench.pages.pieces import Pieces
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import LEASE_S, AgentEnd, Cache, Space
from kvxfer.bench.run.memory import address_of
from kvxfer.bench.run.perftest import device_of
from kvxfer.bench.work.page_data import Indices, PageFiller, Words, block_order, page_keys
from kvxfer.bench.work.rank_cache import RankCache, RankSpec

_DESTINATION = -1


@dataclass(frozen=True, slots=True)
class Share:
    """What one transfer of a move names: regions and blocks of both ends, and layers and heads."""

    src: str
    dst: str
    src_blocks: Indices
    dst_blocks: Indices
    selected: dict[str, range] = field(default_factory=dict)


class PagesEnd(AgentEnd):
    """What both kinds of pages share: the shares of each move, posted, expected or served."""

    _shares: dict[str, list[Share]]
    _leases: list[kvxfer.Lease]

    def __init__(
        self,
        role: str,
        options: PagesOptions,
        coordinator: Channel,
        remote: tuple[str, ...] = ("kv",),
        **more: Any,
    ) -> None:
        (threads,) = options.copy_threads
        device = device_of(options.transport, options.device)
        super().__init__(
            role, options.transport, coordinator, remote=remote, device=device, copy_threads=threads, **more
        )
        self.options = options
        self._leases = []

    def write(self, what: str, iteration: int) -> Message:
        return self._post("write", what, notify=_tag(what, iteration))

    def read(self, what: str, iteration: int) -> Message:
        return self._post("read", what)

    def expect(self, what: str, iteration: int) -> Message:
        share = self._shares[what][0]
        self.start_cpu()
        incoming = self.agent.expect(
            _tag(what, iteration),
            share.dst_blocks,
            self.agent.regions[share.dst],
            timeout_s=self.options.timeout_s,
        )
        self.coordinator.send("reply")
        incoming.wait(self.options.timeout_s)
        return {"cpu_ns": self.cpu_ns(), "rails": list(incoming.rails)}

    def serve_begin(self) -> None:
        """From here the progress thread serves a read; this one waits for the coordinator."""
        if not self._leases:
            regions = self.agent.regions.values()
            self._leases = [region.grant(self.peer, mode="read", ttl_s=LEASE_S) for region in regions]
        self.start_cpu()

    def serve_end(self) -> Message:
        return {"cpu_ns": self.cpu_ns()}

    def read_one_page(self, repeats: int) -> Message:
        """Reads one page again and again, from a source that serves; returns the median time of one."""
        share, timeout_s = self._shares[MOVED][0], self.options.timeout_s
        region, remote = self.agent.regions[share.dst], self.peer.regions[share.src]
        src, dst = share.src_blocks[:1], share.dst_blocks[:1]
        times_ns = []
        for _ in range(repeats):
            start_ns = time.monotonic_ns()
            self.agent.read(region, remote, src, dst, timeout_s=timeout_s).wait(timeout_s)
            times_ns.append(time.monotonic_ns() - start_ns)
        return {"page_ns": int(np.median(times_ns))}

    def _post(self, verb: str, what: str, **more: Any) -> Message:
        """Posts every share by ``agent.write`` or ``agent.read``, and waits for them."""
        post, timeout_s = getattr(self.agent, verb), self.options.timeout_s
        work = []
        for share in self._shares[what]:
            mine, its = (share.src, share.dst) if verb == "write" else (share.dst, share.src)
            work.append((self.agent.regions[mine], self.peer.regions[its], share))
        self.start_cpu()
        start_ns = time.monotonic_ns()
        transfers = [
            post(
                region,
                remote,
                src_blocks=share.src_blocks,
                dst_blocks=share.dst_blocks,
                timeout_s=timeout_s,
                integrity=self.options.integrity,
                **share.selected,
                **more,
            )
            for region, remote, share in work
        ]
        post_ns = time.monotonic_ns() - start_ns
        for transfer in transfers:
            transfer.wait(timeout_s)
        total_ns = time.monotonic_ns() - start_ns
        rails = sorted({rail for transfer in transfers for rail in transfer.rails})
        return {"total_ns": total_ns, "post_ns": post_ns, "cpu_ns": self.cpu_ns(), "rails": rails}


class PlainPages(PagesEnd):
    """Pages of one size, other ones in every iteration; every byte is checked."""

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        role, files = fields.pop("role"), fields.pop("files", None)
        options = options_of(fields)
        super().__init__(role, options, coordinator, tls=None if files is None else kvxfer.Tls(**files))
        blocks = options.num_pages
        shape = (1, blocks, options.page_nbytes)
        axes: Any = {"axes": "lbd", "shape": shape, "dtype": "uint8", "num_blocks": blocks}
        cache = Cache(self.agent, "kv", options.memory, **axes)
        self.page_kind = cache.page_kind
        # Blocks in the order in which each end names them.
        src, dst = (block_order(blocks, options.seed + end) for end in (0, 1))
        self._shares = {MOVED: [Share("kv", "kv", src, dst)]}
        self._pages: Words = cache.pages(options.page_nbytes)
        self._filler = PageFiller(options.page_nbytes)
        self._rows: Indices = src if role == "source" else dst

    def fill(self, iteration: int) -> None:
        self._filler.fill(self._pages, self._rows, self._keys(iteration))

    def clear(self, what: str) -> None:
        self._pages[:] = 0

    def check(self, what: str, iteration: int, corrupt: bool) -> Message:
        """Compares every byte; ``corrupt`` flips one before."""
        if corrupt:
            self._pages[self._rows[-1]].view(np.uint8)[-1] ^= 1
        wrong = self._filler.check(self._pages, self._rows, self._keys(iteration))
        return {"wrong": "" if wrong is None else str(wrong)}

    def _keys(self, iteration: int) -> Words:
        return page_keys(iteration, num_pages=self.options.num_pages)


class LayoutPages(PagesEnd):
    """One destination rank, and all source ranks that it needs, each a region of one agent.

    Beside them, at both ends, a cache like the destination's for the plain copy.
    """

    _stream: socket.socket

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        self._is_source = fields.pop("role") == "source"
        options = options_of(fields)
        self._work = work = options.work
        names = {src: f"rank{src}" for src in work.srcs}
        remote = ("kv", PLAIN) if self._is_source else (*names.values(), PLAIN)
        super().__init__("source" if self._is_source else "destination", options, coordinator, remote)
        self._data = work.data()
        dst_blocks = work.blocks(work.dst, _DESTINATION)
        src_blocks = {src: work.blocks(spec, src) for src, spec in work.srcs.items()}
        # Of the source of the plain copy.
        plain_blocks = work.blocks(work.plain, _DESTINATION - 1)
        every = {"layers": work.layers, "heads": work.dst.heads}
        self._shares = {
            MOVED: [
                Share(
                    names[share.src],
                    "kv",
                    src_blocks[share.src],
                    dst_blocks,
                    {"layers": share.layers, "heads": share.heads},
                )
                for share in work.shares
            ],
            PLAIN: [Share(PLAIN, PLAIN, plain_blocks, dst_blocks, every)],
        }
        self._src_blocks, self._plain_blocks, self._dst_blocks = src_blocks, plain_blocks, dst_blocks
        self._srcs: dict[int, RankCache] = {}
        if self._is_source:
            self._srcs = {src: self._register(names[src], spec) for src, spec in work.srcs.items()}
        else:
            self._moved = self._register("kv", work.dst)
        self._plain = self._register(PLAIN, work.plain)

    def _register(self, name: str, spec: RankSpec) -> RankCache:
        space = Space(self.options.memory, spec.nbytes, name=name)
        self.page_kind = space.page_kind
        cache = spec.place(space.array)
        self.agent.register(name, cache.memory, cache.layout)
        return cache

    def fill(self, iteration: int) -> None:
        """Writes the sequence into every rank, once: transfers leave it as it is."""
        if iteration:
            return
        for src, cache in self._srcs.items():
            self._data.fill(cache, self._src_blocks[src])
        self._data.as_bytes().fill(self._plain, self._plain_blocks)

    def clear(self, what: str) -> None:
        (self._plain if what == PLAIN else self._moved).memory[:] = 0

    def check(self, what: str, iteration: int, corrupt: bool) -> Message:
        """Compares every element of the first iteration, then of a layer; ``corrupt`` flips a bit before.

        The rest would take longer than the moving.
        """
        cache, data = (self._moved, self._data) if what == MOVED else (self._plain, self._data.as_bytes())
        layer = iteration % cache.spec.num_layers
        if corrupt:
            cache.part(layer, 0)[self._dst_blocks[0], 0, 0, 0] ^= 1
        layers = range(layer, layer + 1) if iteration else None
        return {"wrong": data.check(cache, self._dst_blocks, layers)}

    # ---- the same, piece by piece ---------------------------------------------------------------

    def pieces_source(self) -> Message:
        """Makes ready to send piece by piece, over the stream that came with the command."""
        self._stream = socket.socket(fileno=self.coordinator.descriptors.popleft())
        self._pieces = Pieces.of(self._work, self._srcs, self._src_blocks, self._plain, self._dst_blocks)
        return self._pieces.described()

    def pieces_destination(self, stream_nbytes: int) -> None:
        """Makes ready to receive them where the plain copy goes, too."""
        self._stream = socket.socket(fileno=self.coordinator.descriptors.popleft())
        self._stream_nbytes = stream_nbytes

    def pieces_send(self) -> Message:
        start_ns = time.monotonic_ns()
        self._pieces.send(self._stream)
        return {"start_ns": start_ns}

    def pieces_receive(self) -> Message:
        memory = self._plain.memory
        _limits.recv_pieces(self._stream.fileno(), address_of(memory), memory.nbytes, self._stream_nbytes)
        return {"end_ns": time.monotonic_ns()}

    def pieces_check(self, layers: int, tokens: int) -> Message:
        """Compares all that was sent piece by piece."""
        wanted = self._work.layers[:layers]
        return {"wrong": self._data.as_bytes().check(self._plain, self._dst_blocks, wanted, tokens)}


def options_of(fields: Message) -> PagesOptions:
    """Returns the options that a coordinator has sent."""
    return PagesOptions(**{**fields, "copy_threads": tuple(fields["copy_threads"])})


def _tag(what: str, iteration: int) -> bytes:
    return b"%s-%d" % (what.encode(), iteration)
