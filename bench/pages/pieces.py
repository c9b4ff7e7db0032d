"""The same pages, one message for each contiguous piece: how engines move them that know descriptors alone.

Each run of the copy program goes over one loopback TCP stream behind a header that says where it
belongs, and is received straight into its place. Elements are not converted. Nothing of the engine
takes part but the list of runs, which its planner makes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native, plan
from kvxfer.bench import _limits
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.memory import address_of
from kvxfer.bench.work.layout_pair import LayoutWork
from kvxfer.bench.work.page_data import Indices
from kvxfer.bench.work.rank_cache import RankCache
from kvxfer.plan.pairs import pair_units

# A third of a second or so. More are not sent: the first layers, or the first tokens of one layer.
MAX_PIECES = 100_000

_Runs = NDArray[np.uint64]


class PieceSource:
    """Sends the pieces of the source ranks' caches, from the process that has them.

    Parameters
    ----------
    stream
        A connected socket; blocking.
    caches, blocks
        Of the source ranks, by number.
    dst
        A cache like the destination's, of the source's elements: which piece goes where.
    """

    def __init__(
        self,
        stream: socket.socket,
        work: LayoutWork,
        caches: Mapping[int, RankCache],
        blocks: Mapping[int, Indices],
        dst: RankCache,
        dst_blocks: Indices,
    ) -> None:
        self._stream = stream
        self._work, self._caches, self._blocks = work, caches, blocks
        self._dst, self._dst_blocks = dst, dst_blocks
        self._layers, self._num_tokens = self._within(MAX_PIECES)
        runs = np.concatenate(list(self._runs(self._layers, self._num_tokens)))
        # C-contiguous columns, as the native call wants them.
        self._addresses, self._dst_offsets, self._nbytes = np.ascontiguousarray(runs.T)

    def described(self) -> Message:
        """Returns what is sent: ``layers`` from the first on and ``tokens`` of each, in ``pieces``."""
        nbytes = int(self._nbytes.sum())
        return {
            "pieces": len(self._nbytes),
            "nbytes": nbytes,
            "stream_nbytes": nbytes + len(self._nbytes) * _limits.PIECE_HEADER_NBYTES,
            "layers": len(self._layers),
            "tokens": self._num_tokens,
        }

    def send(self) -> Message:
        """Sends all of them."""
        start_ns = time.monotonic_ns()
        _limits.send_pieces(self._stream.fileno(), self._addresses, self._dst_offsets, self._nbytes)
        return {"start_ns": start_ns}

    def close(self) -> None:
        """Ends the stream."""
        self._stream.close()

    def _within(self, most: int) -> tuple[range, int]:
        """Returns the layers and how many tokens make at most `most` pieces, or one page of a layer."""
        layers, num_tokens = self._work.dst.layers, self._work.num_tokens
        one = sum(len(runs) for runs in self._runs(layers[:1], num_tokens))
        if one <= most:
            return layers[: most // one], num_tokens
        page = self._work.page_tokens
        return layers[:1], max(1, num_tokens * most // one // page) * page

    def _runs(self, layers: range, num_tokens: int) -> Iterator[_Runs]:
        """Yields [pieces, 3] of source address, destination offset and bytes, for each share and layer."""
        # As bytes: neither dtypes nor scales differ between these two.
        dst = replace(self._dst.layout, quantization=None)
        for share in self._work.shares:
            cache = self._caches[share.src]
            src = replace(cache.layout, quantization=None)
            program = plan.compile_program(src, dst, heads=share.heads)
            pairs = pair_units(src, dst, self._blocks[share.src], self._dst_blocks, range(num_tokens))
            for layer in layers:
                if layer not in share.layers:
                    continue
                runs = _native.expand(
                    program.loops, layer - program.origin, pairs.src_ids, pairs.dst_ids, 0, program.units
                )
                runs[:, 0] += np.uint64(address_of(cache.memory))
                yield runs


class PieceDestination:
    """Receives the pieces into a cache like the destination's."""

    def __init__(self, stream: socket.socket, cache: RankCache, stream_nbytes: int) -> None:
        self._stream = stream
        self._cache = cache
        self._stream_nbytes = stream_nbytes

    def receive(self) -> Message:
        """Receives all of them."""
        memory = self._cache.memory
        _limits.recv_pieces(self._stream.fileno(), address_of(memory), memory.nbytes, self._stream_nbytes)
        return {"end_ns": time.monotonic_ns()}

    def close(self) -> None:
        """Ends the stream."""
        self._stream.close()
