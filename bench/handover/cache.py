"""One region of a benchmark's agent: memory of a pool, its layout, and the blocks in it."""

from __future__ import annotations

import math

import numpy as np

import kvxfer
from kvxfer.bench.run.endpoint import Endpoint
from kvxfer.bench.work.page_data import Indices, Words


class Cache:
    """A further region of an endpoint's agent, for layers whose blocks are counted apart.

    It is to be made before the agents connect. ``axes``, ``shape``, ``dtype`` and ``num_blocks`` as
    of `Endpoint`, whose own cache this one resembles.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        *,
        axes: str,
        shape: tuple[int, ...],
        dtype: str,
        num_blocks: int,
        seed: int,
    ) -> None:
        # As in `Endpoint`: numpy has no bfloat16, and nothing here computes with it.
        element = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        nbytes = math.prod(shape) * element.itemsize
        self._pool = kvxfer.Pool(num_blocks, nbytes // num_blocks, name=name)
        self._cache = self._pool.array(shape, element)
        self._random = np.random.default_rng(seed)
        layout = kvxfer.KVLayout.from_tensor(self._cache, axes, dtype=dtype)
        self.region = endpoint.agent.register(name, self._cache, layout)

    def pages(self, page_nbytes: int) -> Words:
        """Returns the cache as rows of 64-bit words, one a page, in the order of memory."""
        return self._cache.reshape(-1).view(np.uint64).reshape(-1, page_nbytes // 8)

    def allocate(self, num_blocks: int, owner: str) -> Indices:
        """Takes blocks from the pool, in a seeded order, none adjacent."""
        return self._random.permuted(self._pool.allocate(num_blocks, owner).ids)

    def free(self, blocks: Indices) -> None:
        """Gives blocks back to the pool."""
        self._pool.free(blocks)
