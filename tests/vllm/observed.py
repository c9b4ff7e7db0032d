"""The connector with an observer: page hashes on both sides, and a byte that can be flipped on the way in.

Engines load it by ``kv_connector_module_path``. It writes files into the folder that ``KVXFER_OBSERVED``
names, for each request ``<name>.sent`` and ``<name>.received``, named by the prefill engine's request id, or
by the key of a push. A second worker's files end in ``.1``. They hold the number of workers that write one
and, for each group, block and head, the hash of the bytes in all layers; "" for a missing block. A file
appears when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.step import FetchOrder
from kvxfer.connectors.vllm import KvxferConnector
from kvxfer.connectors.vllm.cache_groups import SpecGroup, groups_of
from kvxfer.connectors.vllm.state_parts import part_of
from tests.vllm.engine import FLIP

_EXPONENT_BYTE = 3  # of a little-endian float32, and of every other bfloat16
_EXPONENT_BIT = 0x20


class ObservedConnector(KvxferConnector):
    """Moves as its base does."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(os.environ["KVXFER_OBSERVED"])
        self._groups = groups_of(kv_cache_config)
        self._rank = vllm_config.parallel_config.rank
        self._num_workers = vllm_config.parallel_config.world_size
        self._layers: list[list[torch.Tensor]] = []
        self._heads: list[list[torch.Tensor]] = []
        self._computed: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {}
        self._ordered: dict[str, FetchOrder] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._layers = [[kv_caches[name] for name in group.layer_names] for group in self._groups]
        self._heads = [_heads_first(*each) for each in zip(self._groups, self._layers, strict=True)]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step
        self._computed |= {grant.request_id: (grant.request_id, grant.tables) for grant in step.grants}
        self._computed |= {chunk.request_id: (chunk.key.hex(), chunk.tables) for chunk in step.chunks}
        self._ordered |= {order.request_id: order for order in step.fetches}
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # Blocks are this request's until its end is returned from here.
        for request_id in finished_req_ids & self._computed.keys():
            name, tables = self._computed.pop(request_id)
            self._write(name, "sent", tables)
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            order = self._ordered.pop(request_id)
            if isinstance(order.source, Handover):
                # Blocks that prefill gave back are on neither side's list, nor are blocks of tokens that
                # decode adds.
                name = order.source.request_id
                held = tuple(
                    tuple(block if there else 0 for block, there in zip(ours, theirs, strict=False))
                    for ours, theirs in zip(order.tables, order.source.tables, strict=True)
                )
            elif isinstance(order.source, ExpectedPush):
                name, held = order.source.key.hex(), order.tables
            else:
                continue
            self._write(name, "received", held)
            if (flip := self._folder / FLIP).exists():
                if flip.read_text() == "draft":
                    self._flip(self._layers[-1][-1], held[self._groups[-1].table])
                    continue
                states = flip.read_text() == "states"
                at = next(at for at, group in enumerate(self._groups) if group.is_state == states)
                self._flip(self._layers[at][0], held[self._groups[at].table])
        return results

    def _write(self, request_id: str, what: str, tables: tuple[tuple[int, ...], ...]) -> None:
        hashes = [
            [
                [_hash(head) for head in zip(*(layer[block] for layer in layers), strict=True)]
                if block
                else ""
                for block in table
            ]
            for layers, table in zip(
                self._heads, (tables[group.table] for group in self._groups), strict=True
            )
        ]
        rank = f".{self._rank}" if self._rank else ""
        written = self._folder / f"writing-{request_id}.{what}{rank}.part"
        written.write_text(json.dumps({"workers": self._num_workers, "hashes": hashes}))
        written.rename(self._folder / f"{request_id}.{what}{rank}")

    def _flip(self, layer: torch.Tensor, table: tuple[int, ...]) -> None:
        block = next(block for block in table if block)
        page = layer[block].view(torch.uint8).flatten()
        page[_EXPONENT_BYTE::4] ^= _EXPONENT_BIT


def _heads_first(group: SpecGroup, layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns each layer's tensor as [block, head, ...]."""
    if group.is_state:
        part = part_of(group.part, group.spec, layers)
        return [view.movedim(part.axes.index("h"), 1) for view in part.views]
    # Latents have no heads.
    return [layer if layer.dim() == 4 else layer[:, None] for layer in layers]


def _hash(layers: Iterable[torch.Tensor]) -> str:
    sha256 = hashlib.sha256()
    for layer in layers:
        sha256.update(layer.contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()
