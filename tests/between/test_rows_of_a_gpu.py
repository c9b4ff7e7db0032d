"""vLLM's caches in their GPU layout, read into SGLang's: worker halves on our tensors, no engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer import KVLayout
from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.regions import CacheMemory
from kvxfer.connectors.common.statistics import FAILURES
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.sglang.cache_parts import RankSlice, parts_of
from kvxfer.layout.engine_layouts import VLLM_ORDERS
from tests.between.sglang_parts import in_floats
from tests.connectors.workers import (
    LAYERS,
    NUM_HEADS,
    NUM_LAYERS,
    PATIENCE,
    Array,
    Pushed,
    Worker,
    order_of,
    pull,
    some_tokens,
)
from tests.vllm.workers import workers as vllm_workers

NUM_BLOCKS, BLOCK_TOKENS, NUM_TOKENS = 32, 32, 150
HEAD_DIM = 4


class SglangWorker(Worker):
    """One rank's cache as SGLang lays it out: ``[page, token, head, dim]`` of keys, and of values.

    Its layout is ``told``, or by default the one that SGLang's connector describes.
    """

    def __init__(self, position: WorkerRank, page_tokens: int, told: KVLayout | None) -> None:
        num_heads = NUM_HEADS // position.tp_size
        shape = NUM_BLOCKS * BLOCK_TOKENS // page_tokens, page_tokens, num_heads, HEAD_DIM
        self.keys, self.values = ([np.zeros(shape, np.float32) for _ in LAYERS] for _ in range(2))
        buffers = [*self.keys, *self.values]
        args = SimpleNamespace(
            kv_data_ptrs=[each.ctypes.data for each in buffers],
            kv_data_lens=[each.nbytes for each in buffers],
            kv_item_lens=[each[0].nbytes for each in buffers],
            kv_cache_dtype_str="float32",
            page_size=page_tokens,
            state_types=[],
        )
        rank = position.tp_rank, position.tp_size
        (part,) = parts_of(args, RankSlice(*rank, *rank, False, NUM_HEADS, False, 0, None, ""))
        group = CacheGroup(0, "kv.0", LAYERS, page_tokens)
        layout = part.layout if told is None else in_floats(part, told.model, told.group)
        super().__init__(position, [CacheMemory(group, part.memory, layout)], {}, **PATIENCE)

    def rows(self, pages: tuple[int, ...], num_tokens: int) -> Array:
        """Returns the contents of some pages: ``[layer, token, head, keys and values]``."""
        both = [
            [each[list(pages)].reshape(-1, *each.shape[2:])[:num_tokens] for each in buffers]
            for buffers in (self.keys, self.values)
        ]
        return np.concatenate([np.stack(each) for each in both], axis=-1)


@contextmanager
def sglang_workers(tp_size: int, page_tokens: int, told: KVLayout | None) -> Iterator[list[SglangWorker]]:
    with ExitStack() as running:
        yield [
            running.enter_context(SglangWorker(WorkerRank("sglang", rank, tp_size), page_tokens, told))
            for rank in range(tp_size)
        ]


@pytest.mark.parametrize("tp_sizes", [(1, 1), (1, 2), (2, 1)], ids=lambda sizes: "tp{}to{}".format(*sizes))
@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("order", VLLM_ORDERS)
def test_every_token_is_brought_in_every_order_of_axes(
    order: str, page_tokens: int, tp_sizes: tuple[int, int]
) -> None:
    pushed = Pushed.draw("handed over", NUM_TOKENS, 1, NUM_BLOCKS // 2, (BLOCK_TOKENS, page_tokens))
    whole = some_tokens(NUM_TOKENS)
    vllm = vllm_workers("vllm", tp_sizes[0], num_blocks=NUM_BLOCKS, block_size=BLOCK_TOKENS, order=order)
    with vllm as prefill:
        told = prefill[0].memory[0].layout
        with sglang_workers(tp_sizes[1], page_tokens, told) as decode:
            for layer in range(NUM_LAYERS):
                pushed.compute(prefill, layer, 0, NUM_TOKENS, whole)
            readers: list[Any] = list(decode)
            pull(pushed, prefill, readers)
            arrived = np.concatenate([each.rows(pushed.dst, NUM_TOKENS) for each in decode], axis=2)
            assert np.array_equal(arrived, whole)


def test_what_the_two_connectors_tell_by_themselves_does_not_fit() -> None:
    # SGLang's tells bytes, and other names.
    pushed = Pushed.draw("handed over", NUM_TOKENS, 1, NUM_BLOCKS, (BLOCK_TOKENS, BLOCK_TOKENS))
    with (
        vllm_workers("vllm", num_blocks=NUM_BLOCKS, block_size=BLOCK_TOKENS) as prefill,
        sglang_workers(1, BLOCK_TOKENS, None) as (decode,),
    ):
        decode.half.step(order_of(pushed, prefill))
        assert "handed over" in decode.until("received", "handed over").failed
        counts = decode.half.take_statistics()
        assert counts is not None
        assert counts.data[FAILURES] == {"pull": {"layout-mismatch": 1}}
        assert not any(each.any() for each in (*decode.keys, *decode.values))
