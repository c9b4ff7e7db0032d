"""The same pages, one message for each contiguous piece: how engines move them that know descriptors alone.

Each run of the copy program goes over one loopback TCP stream behind a header that says where it belongs, and
is received straight into its place. Of the engine the list of runs alone takes part.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native, plan
from kvxfer.bench import _limits
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.memory import address_of
from kvxfer.bench.work.layout_pair import LayoutWork
from kvxfer.bench.work.page_data import Indices
from kvxfer.bench.work.rank_cache import RankCache
from kvxfer.plan.units import pair_units

# A third of a second or so. More are not sent: the first layers, or the first tokens of one layer.
MAX_PIECES = 100_000


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where each piece lies at the source, where it belongs, and how long it is."""

    addresses: NDArray[np.uint64]
    dst_offsets: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    num_layers: int
    num_tokens: int

    @classmethod
    def of(
        cls,
        work: LayoutWork,
        caches: Mapping[int, RankCache],
        blocks: Mapping[int, Indices],
        dst: RankCache,
        dst_blocks: Indices,
    ) -> Self:
        """Returns the pieces of the source ranks' caches; ``dst`` is like the destination's."""

        def runs_of(layers: range, num_tokens: int) -> NDArray[np.uint64]:
            """Returns [pieces, 3] of source address, destination offset and bytes."""
            found = []
            # As bytes: neither dtypes nor scales differ between these two.
            target = replace(dst.layout, quantization=None)
            for share in work.shares:
                cache = caches[share.src]
                src = replace(cache.layout, quantization=None)
                program = plan.compile_program(src, target, heads=share.heads)
                pairs = pair_units(src, target, blocks[share.src], dst_blocks, range(num_tokens))
                for layer in sorted(set(layers) & set(share.layers)):
                    at = layer - program.origin
                    runs = _native.expand(program.loops, at, pairs.src_ids, pairs.dst_ids, 0, program.units)
                    runs[:, 0] += np.uint64(address_of(cache.memory))
                    found.append(runs)
            return np.concatenate(found)

        layers, num_tokens = work.layers, work.num_tokens
        one = len(runs_of(layers[:1], num_tokens))
        if one <= MAX_PIECES:
            layers = layers[: MAX_PIECES // one]
        else:
            page = work.page_tokens
            layers, num_tokens = layers[:1], max(1, num_tokens * MAX_PIECES // one // page) * page
        # C-contiguous columns, as the native call wants them.
        addresses, offsets, nbytes = np.ascontiguousarray(runs_of(layers, num_tokens).T)
        return cls(addresses, offsets, nbytes, len(layers), num_tokens)

    def described(self) -> Message:
        """Returns what is sent: ``layers`` from the first on and ``tokens`` of each, in ``pieces``."""
        count, nbytes = len(self.nbytes), int(self.nbytes.sum())
        return {
            "pieces": count,
            "nbytes": nbytes,
            "stream_nbytes": nbytes + count * _limits.PIECE_HEADER_NBYTES,
            "layers": self.num_layers,
            "tokens": self.num_tokens,
        }

    def send(self, stream: socket.socket) -> None:
        """Sends all of them over a connected, blocking stream."""
        _limits.send_pieces(stream.fileno(), self.addresses, self.dst_offsets, self.nbytes)
