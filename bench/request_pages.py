"""The pages of one request in a cache: which they are, what they hold, and what it cost to touch them."""

from __future__ import annotations

import time

import numpy as np

from kvxfer.bench.endpoint import Endpoint
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.models import ModelShape
from kvxfer.bench.workload import Indices, PageFiller, Words, page_keys


class RequestPages:
    """Fills and checks the cache of one process, ``[layers, kv, blocks]`` pages.

    ``cpu_ns`` is the processor time that this took: it is the benchmark's, not the handover's.
    """

    def __init__(self, shape: ModelShape, endpoint: Endpoint) -> None:
        self.cpu_ns = 0
        self._shape = shape
        self._pages: Words = endpoint.pages(shape.page_nbytes)
        self._num_blocks = len(self._pages) // (shape.num_layers * shape.num_kv)
        self._filler = PageFiller(shape.page_nbytes)

    def fill_layer(self, request: int, layer: int, blocks: Indices) -> None:
        """Writes what prefill would have computed for one layer."""
        start_ns = time.thread_time_ns()
        for kv in range(self._shape.num_kv):
            rows, keys = self._rows_and_keys(request, layer, kv, blocks)
            self._filler.fill(self._pages, rows, keys)
        self.cpu_ns += time.thread_time_ns() - start_ns

    def check(self, request: int, blocks: Indices) -> None:
        """Compares every byte of the request; raises ``CheckFailedError`` with the first wrong one."""
        start_ns = time.thread_time_ns()
        for layer in range(self._shape.num_layers):
            for kv in range(self._shape.num_kv):
                rows, keys = self._rows_and_keys(request, layer, kv, blocks)
                wrong = self._filler.check(self._pages, rows, keys)
                if wrong is not None:
                    raise CheckFailedError(
                        f"request {request}, layer {layer}, {self._kv_name(kv)}: {wrong} "
                        f"(block {int(blocks[wrong.page])})"
                    )
        self.cpu_ns += time.thread_time_ns() - start_ns

    def corrupt(self, blocks: Indices) -> None:
        """Flips a bit of the last byte of the request's last page."""
        rows, _ = self._rows_and_keys(0, self._shape.num_layers - 1, self._shape.num_kv - 1, blocks)
        self._pages[rows[-1]].view(np.uint8)[-1] ^= 1

    def _rows_and_keys(self, request: int, layer: int, kv: int, blocks: Indices) -> tuple[Indices, Words]:
        first = (layer * self._shape.num_kv + kv) * self._num_blocks
        return blocks + np.uint32(first), page_keys(request, layer, kv, num_pages=len(blocks))

    def _kv_name(self, kv: int) -> str:
        return "latent" if self._shape.is_latent else ("keys", "values")[kv]


def open_endpoint(name: str, transport: str, shape: ModelShape, num_blocks: int, seed: int) -> Endpoint:
    """Returns an endpoint whose cache lies as vLLM's and SGLang's do: layer, keys and values, block."""
    token = (shape.head_dim,) if shape.is_latent else (shape.num_heads, shape.head_dim)
    kv = () if shape.is_latent else (shape.num_kv,)
    return Endpoint(
        name,
        transport,
        "pool",
        axes="lbtd" if shape.is_latent else "l2bthd",
        shape=(shape.num_layers, *kv, num_blocks, shape.tokens_per_block, *token),
        dtype="bfloat16",
        num_blocks=num_blocks,
        seed=seed,
    )
