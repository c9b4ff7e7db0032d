"""States between engines with different TP sizes: workers without an engine, rows against an oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from kvxfer import LeaseToken
from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.step import Chunk, FetchOrder, Grant, Step
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.vllm.cache_groups import SpecGroup, groups_of
from kvxfer.connectors.vllm.cache_tensors import ModelCache
from tests.seeds import seed_of
from tests.vllm.workers import TensorWorker as Worker
from tests.waiting import until

NUM_BLOCKS = 5
PADDING_NBYTES = 96
NUM_LAYERS = 2
NUM_INPUTS = 3
EARLIER_BLOCK, SRC_BLOCK, DST_BLOCK = 1, 2, 4
BLOCK_SIZE, NUM_TOKENS = 64, 100
# (heads of each projection of a convolution, dim of one), and the state's heads, rows and columns
KINDS = {
    "GDN_ATTN": (((4, 16), (4, 16), (8, 32)), (8, 32, 16)),
    "MAMBA2": (((8, 32), (2, 16), (2, 16)), (8, 32, 16)),
}


class Rows:
    """The contents of a rank for one of these layers, made from the whole model's states."""

    def __init__(self, kind: str, dim_first: bool, seed: int = 0) -> None:
        self.kind, self.dim_first = kind, dim_first
        random = np.random.default_rng(seed_of("rows", seed))
        projections, state = KINDS[kind]
        self.inputs = [
            random.integers(0, 2**16, (NUM_LAYERS, NUM_INPUTS, heads, dim), np.uint16)
            for heads, dim in projections
        ]
        self.state = random.integers(0, 2**32, (NUM_LAYERS, *state), np.uint32)

    def spec(self, tp_size: int) -> MambaSpec:
        conv_dim = sum(each[0, 0].size for each in self.inputs) // tp_size
        _, heads, rows, columns = self.state.shape
        conv = (conv_dim, NUM_INPUTS) if self.dim_first else (NUM_INPUTS, conv_dim)
        return MambaSpec(
            block_size=BLOCK_SIZE,
            shapes=(conv, (heads // tp_size, rows, columns)),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_type=MambaAttentionBackendEnum[self.kind],
        )

    def row(self, layer: int, rank: int, tp_size: int) -> NDArray[np.uint8]:
        """Returns the bytes of a rank's row: its heads of each projection's inputs, and their states."""
        mine = [np.split(each[layer], tp_size, axis=1)[rank] for each in self.inputs]
        conv = np.concatenate([each.reshape(NUM_INPUTS, -1) for each in mine], axis=1)
        state = np.split(self.state[layer], tp_size)[rank]
        conv = conv.T if self.dim_first else conv
        return np.concatenate(
            [np.ascontiguousarray(conv).view(np.uint8).ravel(), state.view(np.uint8).ravel()]
        )


def groups_with(spec: MambaSpec) -> tuple[SpecGroup, ...]:
    group = SimpleNamespace(layer_names=[f"layer.{at}" for at in range(NUM_LAYERS)], kv_cache_spec=spec)
    config: Any = SimpleNamespace(transfer_group_ids=[0], kv_cache_groups=[group])
    return groups_of(config)


@contextmanager
def engine(spec: MambaSpec, tp_size: int) -> Iterator[list[Worker]]:
    """Yields an engine's ranks with caches as an engine makes them: rows of bytes followed by padding."""
    nbytes, groups = spec.page_size_bytes, groups_with(spec)
    with ExitStack() as stack:
        made = []
        for rank in range(tp_size):
            pages = torch.full((NUM_LAYERS, NUM_BLOCKS, nbytes + PADDING_NBYTES), 0x5A, dtype=torch.int8)
            caches = {f"layer.{at}": pages[at, :, None, None, :nbytes] for at in range(NUM_LAYERS)}
            cache = ModelCache("model", "auto", 4, NUM_BLOCKS)
            worker = Worker(WorkerRank("engine", rank, tp_size), groups, caches, cache)
            made.append(stack.enter_context(worker))
        yield made


def pages_of(worker: Worker) -> NDArray[np.uint8]:
    """Returns its rows and their padding: [layer, block, byte]."""
    pages = worker.tensors["layer.0"]._base
    assert pages is not None
    rows: NDArray[np.uint8] = pages.numpy().view(np.uint8)
    return rows


def nothing() -> None:
    """Prefill's computation if nothing can be moved: none."""


def pull(prefill: list[Worker], decode: list[Worker], compute: Callable[[], None]) -> dict[str, set[int]]:
    """Hands one request's states over after they are computed; returns what failed."""
    compute()
    num_groups = len(prefill[0].groups)
    leases = tuple(LeaseToken.draw() for _ in range(num_groups))
    tables, sizes = ((0, SRC_BLOCK),) * num_groups, (BLOCK_SIZE,) * num_groups
    for worker in prefill:
        worker.half.step(Step(grants=[Grant("request", leases, tables)]))
    ranks = tuple(worker.rank for worker in prefill)
    handover = Handover("request", ranks, leases, tables, sizes, (1,) * num_groups, NUM_TOKENS)
    order(decode, handover)
    return collected(prefill, decode)


def push(
    prefill: list[Worker], decode: list[Worker], compute: Callable[[], None], late: bool = False
) -> dict[str, set[int]]:
    """Hands one request's states over in the step that computes them; returns what failed."""
    key = bytes(16)
    source = ExpectedPush(key, tuple(worker.rank for worker in prefill), "digest")
    if not late:
        for worker in prefill:
            worker.half.collect(set())  # decode registers with engines that have begun
        order(decode, source)
        until(lambda: all(knows(worker, key, decode) for worker in prefill), "registrations")
    num_groups = len(prefill[0].groups)
    # The first chunk ends with a state that is not needed.
    for table, first, stop in (((EARLIER_BLOCK,), 0, BLOCK_SIZE), ((0, SRC_BLOCK), BLOCK_SIZE, NUM_TOKENS)):
        chunk = Chunk("request", key, "digest", (table,) * num_groups, first, stop, NUM_TOKENS)
        for worker in prefill:
            worker.half.before_forward(Step(chunks=[chunk]))
        if stop == NUM_TOKENS:
            compute()
        for worker in prefill:
            worker.half.after_forward(whole=True)
    if late:
        order(decode, source)
    return collected(prefill, decode)


def push_late(
    prefill: list[Worker], decode: list[Worker], compute: Callable[[], None]
) -> dict[str, set[int]]:
    """Like `push`, but decode registers after everything is computed."""
    return push(prefill, decode, compute, late=True)


def knows(worker: Worker, key: bytes, decode: list[Worker]) -> bool:
    """Whether every reader's registration waits at a worker of prefill."""
    for each in (*decode, worker):
        assert not each.half.collect(set()).received
    assert worker.half._pushes is not None
    waiting = worker.half._pushes._registrations._keys.get(key, {})
    return sum(len(each.arrivals) for each in waiting.values()) == len(decode)


def order(decode: list[Worker], source: Handover | ExpectedPush) -> None:
    """Has every worker of decode ask for the request."""
    tables = ((0, DST_BLOCK),) * len(decode[0].groups)
    for worker in decode:
        worker.half.step(Step(fetches=[FetchOrder("request", source, tables, 0, NUM_TOKENS)]))


def collected(prefill: list[Worker], decode: list[Worker]) -> dict[str, set[int]]:
    """Returns what failed; prefill gives the others back."""
    failed: dict[str, set[int]] = {}
    ended = {"received": 0, "sent": 0}

    def all_have() -> bool:
        for worker in decode:
            results = worker.half.collect(set())
            ended["received"] += len(results.received)
            failed.update(results.failed)
        ended["sent"] += sum(len(worker.half.collect({"request"}).sent) for worker in prefill)
        return ended["received"] == len(decode) and (bool(failed) or ended["sent"] == len(prefill))

    until(all_have, "every worker's end")
    return failed


@pytest.mark.parametrize("how", [pull, push, push_late])
@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_rows_of_any_two_sizes_are_those_of_the_model(
    how: Callable[..., dict[str, set[int]]], kind: str, dim_first: bool, src_tp: int, dst_tp: int
) -> None:
    rows = Rows(kind, dim_first)
    with engine(rows.spec(src_tp), src_tp) as prefill, engine(rows.spec(dst_tp), dst_tp) as decode:

        def compute() -> None:
            for rank, worker in enumerate(prefill):
                for layer in range(NUM_LAYERS):
                    row = rows.row(layer, rank, src_tp)
                    pages_of(worker)[layer, SRC_BLOCK, : len(row)] = row

        assert how(prefill, decode, compute) == {}
        for rank, worker in enumerate(decode):
            expected = np.full_like(pages_of(worker), 0x5A)
            for layer in range(NUM_LAYERS):
                row = rows.row(layer, rank, dst_tp)
                expected[layer, DST_BLOCK, : len(row)] = row
            assert np.array_equal(pages_of(worker), expected)


def row_of_one_piece(tp_size: int) -> MambaSpec:
    """Rows of a kind whose parts are not described separately."""
    return MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((NUM_INPUTS, 64 // tp_size), (64 // tp_size, 16)),
        dtypes=(torch.float32, torch.float32),
        mamba_type=MambaAttentionBackendEnum.MAMBA1,
    )


def test_rows_of_one_piece_go_to_the_same_shard(seed: int) -> None:
    random = np.random.default_rng(seed)
    with engine(row_of_one_piece(2), 2) as prefill, engine(row_of_one_piece(2), 2) as decode:
        for worker in prefill:
            pages_of(worker)[:] = random.integers(0, 256, pages_of(worker).shape, np.uint8)
        assert pull(prefill, decode, nothing) == {}
        for source, destination in zip(prefill, decode, strict=True):
            row = slice(0, -PADDING_NBYTES)
            assert np.array_equal(
                pages_of(source)[:, SRC_BLOCK, row], pages_of(destination)[:, DST_BLOCK, row]
            )


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1)])
def test_rows_of_one_piece_are_refused_at_another_size(
    src_tp: int, dst_tp: int, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        engine(row_of_one_piece(src_tp), src_tp) as prefill,
        engine(row_of_one_piece(dst_tp), dst_tp) as decode,
    ):
        assert "request" in pull(prefill, decode, nothing)
        for worker in decode:
            assert (pages_of(worker) == 0x5A).all()
    assert "differ in region 'kv.0'" in caplog.text


def one_group(tp_size: int) -> MambaSpec:
    """Rows of a Mamba2 whose B and C have one group, of which every rank has a copy."""
    heads, dim, columns = 8 // tp_size, 32, 16
    return MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((NUM_INPUTS, heads * dim + 2 * columns), (heads, dim, columns)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
    )


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1), (2, 4)])
def test_groups_that_every_rank_has_a_copy_of_are_refused_at_another_size(
    src_tp: int, dst_tp: int, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(one_group(src_tp), src_tp) as prefill, engine(one_group(dst_tp), dst_tp) as decode:
        for worker in prefill:
            pages_of(worker)[:] = 7
        assert "request" in pull(prefill, decode, nothing)
        for worker in decode:
            assert (pages_of(worker) == 0x5A).all()
    assert "differ in region 'kv.0.b'" in caplog.text
    print(caplog.text)
