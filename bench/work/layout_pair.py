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
from kvxfer.bench.work.models import model
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

    dst: RankSpec
    srcs: dict[int, RankSpec]
    shares: tuple[Share, ...]
    plain: RankSpec
    page_tokens: int  # the fewest that are whole pages at both ends
    num_tokens: int
    seed: int

    @classmethod
    def sized(cls, src_layout: str, dst_layout: str, shape: str, nbytes: int, seed: int) -> LayoutWork:
        """Makes a sequence whose elements at the sources are at most `nbytes`.

        The model is cut to as many layers as leave a rank 32 pages. Raises `BenchError` for unknown names
        and too few bytes for a page, `UsageError` where no program leads there.
        """
        src, dst = NamedLayout.parse(src_layout), NamedLayout.parse(dst_layout)
        whole = model(shape)
        page = math.lcm(src.block_tokens, dst.block_tokens)
        # Of one token in a layer, at the sources.
        row = RankSpec.of(dst, whole, 1, 0, 1).without_scales(src.dtype).row_nbytes
        layers = min(whole.num_layers, max(1, nbytes // (row * page * _MIN_PAGES)))
        num_tokens = nbytes // (row * layers * page) * page
        if not num_tokens:
            raise BenchError(
                f"{nbytes} bytes are too few for {page} tokens in {layers} layers of {row} bytes a token: "
                "raise --total-mib"
            )
        return cls.of(src_layout, dst_layout, shape, layers, num_tokens, seed)

    @classmethod
    def of(
        cls,
        src_layout: str,
        dst_layout: str,
        shape: str,
        layers: int,
        num_tokens: int,
        seed: int,
        spare: int = 1,
    ) -> LayoutWork:
        """Makes a sequence of `num_tokens` tokens, whole pages at both ends.

        Every rank has ``spare`` times the blocks of the sequence. Raises as `sized`.
        """
        src, dst = NamedLayout.parse(src_layout), NamedLayout.parse(dst_layout)
        whole = model(shape)
        target = RankSpec.of(dst, whole, layers, 0, num_tokens * spare)
        srcs = [RankSpec.of(src, whole, layers, rank, num_tokens * spare) for rank in range(src.tp)]
        shares = route([layout_of(spec) for spec in srcs], [layout_of(target)])
        needed = {share.src: srcs[share.src] for share in shares}
        plain = target.without_scales(src.dtype)
        page_tokens = math.lcm(src.block_tokens, dst.block_tokens)
        return cls(target, needed, shares, plain, page_tokens, num_tokens, seed)

    def programs(self) -> list[CopyProgram]:
        """Compiles the program of each share."""
        layouts = {src: layout_of(spec) for src, spec in self.srcs.items()}
        dst = layout_of(self.dst)
        return [plan.compile_program(layouts[share.src], dst, heads=share.heads) for share in self.shares]

    @property
    def layers(self) -> range:
        """All that both ends hold."""
        return range(self.dst.num_layers)

    @property
    def src_nbytes(self) -> int:
        """Bytes of the elements that move, as the sources store them."""
        return self.num_tokens * self.dst.num_layers * self.plain.row_nbytes

    @property
    def dst_nbytes(self) -> int:
        """The same as the destination stores them."""
        return self.num_tokens * self.dst.num_layers * self.dst.row_nbytes

    def described(self) -> Message:
        """Returns what a result says of it."""
        programs = self.programs()
        return {
            "layers": self.dst.num_layers,
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
        return block_order(spec.num_blocks, self.seed + 2 + rank)

    def data(self) -> RankData:
        """Returns what the ranks hold."""
        dst = self.dst
        dtype = self.plain.named.dtype
        return RankData(dtype, dst.total_heads, dst.head_dim, self.num_tokens, self.seed)


def layout_of(spec: RankSpec) -> kvxfer.KVLayout:
    """Returns the layout of a rank without its memory."""
    return spec.place(memory.reserve(spec.nbytes)).layout
