"""The pages of requests in a cache: which they are, what they hold, and what it cost to touch them."""

from __future__ import annotations

import time

import numpy as np

import kvxfer
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.run.endpoint import Cache
from kvxfer.bench.work.models import NUM_KV, ModelShape
from kvxfer.bench.work.page_data import Indices, PageFiller, page_keys


class RequestPages:
    """Fills and checks the cache of one process, which lies as vLLM's and SGLang's do.

    ``cpu_ns`` is the processor time that this took: it is the benchmark's, not the handover's.
    """

    def __init__(self, agent: kvxfer.Agent, shape: ModelShape, num_blocks: int, seed: int) -> None:
        self.cpu_ns = 0
        self._shape = shape
        self._num_blocks = num_blocks
        page = shape.tokens_per_block, shape.num_heads, shape.head_dim
        self.cache = Cache(
            agent,
            "kv",
            "pool",
            axes="l2bthd",
            shape=(shape.num_layers, NUM_KV, num_blocks, *page),
            dtype="bfloat16",
            num_blocks=num_blocks,
            seed=seed,
        )
        self._pages = self.cache.pages(shape.page_nbytes)
        self._filler = PageFiller(shape.page_nbytes)

    def allocate(self, request: int, num_tokens: int) -> Indices:
        """Takes blocks for a request."""
        return self.cache.allocate(self._shape.blocks_for(num_tokens), f"request {request}")

    def fill_layer(self, request: int, layer: int, blocks: Indices) -> None:
        """Writes what prefill would have computed for one layer."""
        start_ns = time.thread_time_ns()
        for kv in range(NUM_KV):
            keys = page_keys(request, layer, kv, num_pages=len(blocks))
            self._filler.fill(self._pages, self._rows(layer, kv, blocks), keys)
        self.cpu_ns += time.thread_time_ns() - start_ns

    def check(self, request: int, blocks: Indices) -> None:
        """Compares every byte of a request; raises ``CheckFailedError`` with the first wrong one."""
        start_ns = time.thread_time_ns()
        for layer in range(self._shape.num_layers):
            for kv in range(NUM_KV):
                keys = page_keys(request, layer, kv, num_pages=len(blocks))
                wrong = self._filler.check(self._pages, self._rows(layer, kv, blocks), keys)
                if wrong is not None:
                    where = f"request {request}, layer {layer}, {('keys', 'values')[kv]}"
                    raise CheckFailedError(f"{where}: {wrong} (block {int(blocks[wrong.page])})")
        self.cpu_ns += time.thread_time_ns() - start_ns

    def corrupt(self, blocks: Indices) -> None:
        """Flips a bit of the last byte of a request's last page."""
        rows = self._rows(self._shape.num_layers - 1, NUM_KV - 1, blocks)
        self._pages[rows[-1]].view(np.uint8)[-1] ^= 1

    def _rows(self, layer: int, kv: int, blocks: Indices) -> Indices:
        return blocks + np.uint32((layer * NUM_KV + kv) * self._num_blocks)
