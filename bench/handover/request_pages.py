"""The pages of one request in a cache: which they are, what they hold, and what it cost to touch them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.run.endpoint import Cache
from kvxfer.bench.work.models import LayerGroup, ModelShape
from kvxfer.bench.work.page_data import Indices, PageFiller, Words, mix, page_keys

# Keys of layers begin with this, contents with a request or a prefix.
_LAYER_SPACE = 1 << 41
_PREFIX_SPACE = 1 << 42


@dataclass(frozen=True, slots=True)
class GroupTable:
    """A request's blocks in one group of layers, and what each of them holds."""

    blocks: Indices
    contents: Words


class GroupPages:
    """The pages of one group of layers, ``[layers, pages, blocks]`` of them."""

    def __init__(self, group: LayerGroup, cache: Cache) -> None:
        self.group = group
        self.cache = cache
        self._pages = cache.pages(group.page_nbytes)
        self._num_blocks = len(self._pages) // (len(group.layers) * group.pages_per_layer)
        self._filler = PageFiller(group.page_nbytes)

    def fill(self, number: int, table: GroupTable) -> None:
        """Writes what prefill would have computed for the group's layer ``number``."""
        for page in range(self.group.pages_per_layer):
            self._filler.fill(self._pages, self._rows(number, page, table), self._keys(number, page, table))

    def check(self, request: int, table: GroupTable) -> None:
        """Compares every byte; raises ``CheckFailedError`` with the first wrong one."""
        for number, layer in enumerate(self.group.layers):
            for page in range(self.group.pages_per_layer):
                rows, keys = self._rows(number, page, table), self._keys(number, page, table)
                wrong = self._filler.check(self._pages, rows, keys)
                if wrong is not None:
                    raise CheckFailedError(
                        f"request {request}, layer {layer}, {self._page_name(page)}: {wrong} "
                        f"(block {int(table.blocks[wrong.page])})"
                    )

    def corrupt(self, table: GroupTable) -> None:
        """Flips a bit of the last byte of the request's last page."""
        rows = self._rows(len(self.group.layers) - 1, self.group.pages_per_layer - 1, table)
        self._pages[rows[-1]].view(np.uint8)[-1] ^= 1

    def _rows(self, number: int, page: int, table: GroupTable) -> Indices:
        first = (number * self.group.pages_per_layer + page) * self._num_blocks
        return table.blocks + np.uint32(first)

    def _keys(self, number: int, page: int, table: GroupTable) -> Words:
        return mix(table.contents + page_keys(_LAYER_SPACE, self.group.layers[number], page, num_pages=1))

    def _page_name(self, page: int) -> str:
        if self.group.is_state:
            return "state"
        return "latent" if self.group.pages_per_layer == 1 else ("keys", "values")[page]


class RequestPages:
    """Fills and checks the caches of one process, one for each group of layers.

    ``cpu_ns`` is the processor time that this took: it is the benchmark's, not the handover's.
    """

    def __init__(self, shape: ModelShape, caches: list[Cache]) -> None:
        self.cpu_ns = 0
        self.groups = [GroupPages(*pair) for pair in zip(shape.groups, caches, strict=True)]
        self._shape = shape

    def allocate(self, request: int, num_tokens: int, prefix: Prefix, skip: int = 0) -> list[GroupTable]:
        """Takes blocks for a request in every group, without the first ``skip`` of each."""
        tables = []
        for pages in self.groups:
            needed = pages.group.blocks_of(num_tokens)[skip:]
            blocks = pages.cache.allocate(len(needed), f"request {request}")
            contents = prefix.contents(request, needed.stop)[needed.start :]
            tables.append(GroupTable(blocks, contents))
        return tables

    def free(self, tables: list[GroupTable]) -> None:
        """Gives a request's blocks back."""
        for pages, table in zip(self.groups, tables, strict=True):
            pages.cache.free(table.blocks)

    def fill_layer(self, layer: int, tables: list[GroupTable]) -> None:
        """Writes what prefill would have computed for one layer of the model."""
        start_ns = time.thread_time_ns()
        group, number = self._shape.places[layer]
        self.groups[group].fill(number, tables[group])
        self.cpu_ns += time.thread_time_ns() - start_ns

    def check(self, request: int, tables: list[GroupTable]) -> None:
        """Compares every byte of the request; raises ``CheckFailedError`` with the first wrong one."""
        start_ns = time.thread_time_ns()
        for pages, table in zip(self.groups, tables, strict=True):
            pages.check(request, table)
        self.cpu_ns += time.thread_time_ns() - start_ns

    def layers_nbytes(self, tables: list[GroupTable]) -> list[int]:
        """Returns the bytes of a request in each layer of the model."""
        return [
            len(tables[group].blocks) * self.groups[group].group.layer_nbytes
            for group, _ in self._shape.places
        ]

    def num_pages(self, tables: list[GroupTable]) -> int:
        """Returns the pages of a request in all layers."""
        return sum(
            len(table.blocks) * len(pages.group.layers) * pages.group.pages_per_layer
            for pages, table in zip(self.groups, tables, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request has in common with others: ``ids`` of chunks of ``chunk_blocks`` blocks each."""

    ids: tuple[int, ...] = ()
    chunk_blocks: int = 1

    def contents(self, request: int, num_blocks: int) -> Words:
        """Returns a number for each block: equal where the tokens up to its end are."""
        contents = page_keys(request, num_pages=num_blocks)
        shared = min(self.num_shared, num_blocks)
        if shared:
            chunks = [page_keys(_PREFIX_SPACE, one, num_pages=self.chunk_blocks) for one in self.ids]
            contents[:shared] = np.concatenate(chunks)[:shared]
        return contents

    @property
    def num_shared(self) -> int:
        """Blocks of the chunks."""
        return len(self.ids) * self.chunk_blocks


def open_caches(agent: kvxfer.Agent, shape: ModelShape, num_blocks: list[int], seed: int) -> list[Cache]:
    """Returns the caches of a process, one for each group. They lie as vLLM's and SGLang's do.

    That is: layer, keys and values, block.
    """
    return [
        Cache(agent, group.name, "pool", **_axes_and_shape(shape, group, count), num_blocks=count, seed=seed)
        for group, count in zip(shape.groups, num_blocks, strict=True)
    ]


def _axes_and_shape(shape: ModelShape, group: LayerGroup, num_blocks: int) -> dict[str, Any]:
    layers = len(group.layers)
    if group.is_state:
        return {"axes": "lbd", "shape": (layers, num_blocks, group.page_nbytes), "dtype": "uint8"}
    token = (shape.head_dim,) if shape.is_latent else (shape.num_heads, shape.head_dim)
    kv = () if shape.is_latent else (shape.num_kv,)
    return {
        "axes": "lbtd" if shape.is_latent else "l2bthd",
        "shape": (layers, *kv, num_blocks, shape.tokens_per_block, *token),
        "dtype": "bfloat16",
    }
