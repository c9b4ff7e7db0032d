"""What a pair of named layouts comes to: ranks, their caches, who serves whom, how many tokens. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import kvxfer
from kvxfer import plan
from kvxfer.bench.errors import BenchError
from kvxfer.bench.run import memory
from kvxfer.bench.run.channel import Message
from kvxfer.bench.work.layout_names import NamedLayout
from kvxfer.bench.work.models import ModelShape, model
from kvxfer.bench.work.page_data import Indices, block_order
from kvxfer.bench.work.rank_cache import RankSpec
from kvxfer.bench.work.rank_data import RankData
from kvxfer.plan.program import CopyProgram
from kvxfer.plan.sharding import Share, route

# Where the model is cut to fewer layers, so that a transfer still names many pages.
_MIN_PAGES = 32


@dataclass(frozen=True, slots=True)
class LayoutWork:
    """One destination rank (the first), the sources that it needs, and a sequence.

    ``srcs`` are the source ranks that serve it, by their number among all, ``shares`` what each of them
    serves, ``plain`` the destination's cache with the source's elements, copied between equal layouts.
    """

    src_named: NamedLayout
    dst: RankSpec
    srcs: dict[int, RankSpec]
    shares: tuple[Share, ...]
    plain: RankSpec
    num_tokens: int
    num_layers: int
    pattern: str
    seed: int

    @classmethod
    def sized(
        cls, src_layout: str, dst_layout: str, shape: str, nbytes: int, layers: int, pattern: str, seed: int
    ) -> LayoutWork:
        """Makes a sequence whose elements at the sources are at most `nbytes`.

        ``layers`` are of the model, at both ends; 0: as many as leave a rank 32 pages. Raises `BenchError`
        for unknown names and too few bytes for a page, `UsageError` where no program leads there.
        """
        src, dst = NamedLayout.parse(src_layout), NamedLayout.parse(dst_layout)
        whole = model(shape)
        page = math.lcm(src.block_tokens, dst.block_tokens)
        stages = math.lcm(src.pp, dst.pp)
        one = _spec(dst, whole, dst.pp, 0, 0, 1).without_scales(src.dtype)
        # Of one token in a layer, at the sources.
        row = one.num_kv * len(one.heads) * one.head_dim * one.itemsize
        if not layers:
            wanted = max(1, nbytes // (row * page * _MIN_PAGES)) * dst.pp
            layers = max(stages, min(whole.num_layers, wanted) // stages * stages)
        num_tokens = nbytes // (row * -(-layers // dst.pp) * page) * page
        if not num_tokens:
            raise BenchError(
                f"{nbytes} bytes hold no {page} tokens in {layers} layers of {row} bytes a token: "
                "take more with --total-mib, or fewer --layers"
            )
        return cls.of(src_layout, dst_layout, shape, layers, num_tokens, pattern, seed)

    @classmethod
    def of(
        cls,
        src_layout: str,
        dst_layout: str,
        shape: str,
        layers: int,
        num_tokens: int,
        pattern: str,
        seed: int,
        spare: int = 1,
    ) -> LayoutWork:
        """Makes a sequence of `num_tokens` tokens, whole pages at both ends.

        Every rank has ``spare`` times the blocks of the sequence. Raises as `sized`.
        """
        src, dst = NamedLayout.parse(src_layout), NamedLayout.parse(dst_layout)
        whole = model(shape)
        if layers % math.lcm(src.pp, dst.pp):
            raise BenchError(f"--layers {layers} cannot be divided among pp{max(src.pp, dst.pp)} stages")
        target = _spec(dst, whole, layers, 0, 0, num_tokens * spare)
        srcs = [
            _spec(src, whole, layers, tp_rank, pp_rank, num_tokens * spare)
            for pp_rank in range(src.pp)
            for tp_rank in range(src.tp)
        ]
        shares = route([layout_of(spec) for spec in srcs], [layout_of(target)])
        needed = {share.src: srcs[share.src] for share in shares}
        plain = target.without_scales(src.dtype)
        return cls(src, target, needed, shares, plain, num_tokens, layers, pattern, seed)

    def programs(self) -> list[CopyProgram]:
        """Compiles the program of each share."""
        layouts = {src: layout_of(spec) for src, spec in self.srcs.items()}
        dst = layout_of(self.dst)
        return [plan.compile_program(layouts[share.src], dst, heads=share.heads) for share in self.shares]

    @property
    def page_tokens(self) -> int:
        """The fewest tokens that are whole pages at both ends."""
        return math.lcm(self.src_named.block_tokens, self.dst.named.block_tokens)

    @property
    def src_nbytes(self) -> int:
        """Bytes of the elements that move, as the sources store them."""
        spec = self.plain
        row = len(spec.layers) * spec.num_kv * len(spec.heads) * spec.head_dim * spec.itemsize
        return row * self.num_tokens

    @property
    def dst_nbytes(self) -> int:
        """The same as the destination stores them."""
        return self.src_nbytes // self.plain.itemsize * self.dst.itemsize

    def described(self) -> Message:
        """Returns what a result says of it."""
        programs = self.programs()
        return {
            "layers": self.num_layers,
            "num_tokens": self.num_tokens,
            "src_nbytes": self.src_nbytes,
            "dst_nbytes": self.dst_nbytes,
            "num_sources": len(self.srcs),
            "runs_per_pair": max(program.runs_per_pair for program in programs),
            "smallest_run_nbytes": min(program.smallest_run_nbytes for program in programs),
            "explain": programs[0].explain(),
        }

    def blocks(self, spec: RankSpec, rank: int) -> Indices:
        """Returns the block table of one rank: of the source ranks by number, -1 for the destination."""
        return block_order(self.pattern, spec.num_blocks, self.seed + 2 + rank)

    def data(self) -> RankData:
        """Returns what the ranks hold."""
        return RankData(self.src_named, self.dst.total_heads, self.dst.head_dim, self.num_tokens, self.seed)


def layout_of(spec: RankSpec) -> kvxfer.KVLayout:
    """Returns the layout of a rank without its memory."""
    return spec.place(memory.reserve(spec.nbytes)).layout


def _spec(
    named: NamedLayout, shape: ModelShape, num_layers: int, tp_rank: int, pp_rank: int, num_tokens: int
) -> RankSpec:
    return RankSpec.of(named, shape, num_layers, tp_rank, pp_rank, -(-num_tokens // named.block_tokens))
