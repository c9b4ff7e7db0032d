"""vLLM's connector, with the pages of vLLM's CPU kernels described as rows of tokens, keys apart from values.

The connector describes such a page as bytes, which only the same kernels can read. In float32 these kernels
store a head's part of a page as ``[dim, token]`` of keys, followed by ``[token, dim]`` of values. With
strides this is an ordinary layout, and the reader may have another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch

import kvxfer
from kvxfer.connectors.common.regions import CacheMemory
from kvxfer.connectors.vllm import KvxferConnector
from kvxfer.connectors.vllm.cache_tensors import memory_of

#: Names of the two regions.
KEYS: Final = "keys"
VALUES: Final = "values"

#: Of this process's engine, for each layer ``[page, head, dim, token]`` and ``[page, head, token, dim]``.
views: dict[str, list[torch.Tensor]] = {}


class RowsConnector(KvxferConnector):
    """Moves pages with the leases and receipts of its base."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        (packed,) = memory_of(self._groups, kv_caches, self._cache, self._position)
        self._moving.register(rows_of(packed, self._cache.model))


def rows_of(packed: CacheMemory, model: str) -> list[CacheMemory]:
    """Returns keys and values of a group whose pages the connector describes as bytes."""
    num_tokens = packed.group.block_size // packed.pages_per_block
    planes = [pages.unflatten(2, (2, -1)) for pages in packed.tensors]
    views[KEYS] = [plane[:, :, 0].unflatten(2, (-1, num_tokens)) for plane in planes]
    views[VALUES] = [plane[:, :, 1].unflatten(2, (num_tokens, -1)) for plane in planes]
    return [
        _region(packed, 0, KEYS, views[KEYS], "bhdt", model),
        _region(packed, 1, VALUES, views[VALUES], "bhtd", model),
    ]


def _region(
    packed: CacheMemory, shape: int, name: str, tensors: Sequence[Any], axes: str, model: str
) -> CacheMemory:
    told = packed.layout
    layout = kvxfer.KVLayout.from_tensors(
        list(tensors),
        axes,
        first_head=told.first_head,
        total_heads=told.total_heads,
        null_block=told.null_block,
        model=model,
        group=name,
    )
    # As the layers of a model and of its draft: one block table, and a lease derived for each region.
    group = replace(packed.group, name=name, shape=shape)
    return CacheMemory(group, list(tensors), layout, packed.pages_per_block)
