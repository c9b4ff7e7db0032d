"""One rank's worker with the engine's streams, with other ranks, and with its cache."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.step import Claimed, FetchOrder, Grant, News, Step
from kvxfer.connectors.trtllm.agreement import Agreement, Said
from tests.trtllm import fake_engine
from tests.trtllm.cache import BLOCK_SIZE, NUM_LAYERS
from tests.waiting import until

NUM_BLOCKS = 8
SETTINGS = '{"role": "both", "model": "tiny", "huge_pages": false}'


class LateStream:
    """Runs its work in order, when a test says so. Engines have several streams."""

    def __init__(self) -> None:
        self.given: deque[Callable[[], None]] = deque()

    def run(self) -> None:
        while self.given:
            self.given.popleft()()


class Recording:
    """The worker's `EngineStream` as on a GPU, with streams that run late."""

    def __init__(self) -> None:
        self.current: Any = None

    def record(self, trigger: kvxfer.Trigger, value: int) -> None:
        self.current.given.append(partial(trigger.fire, value))

    def hold(self, work: kvxfer.Group, layer: int) -> bool:
        return False


@pytest.fixture
def worker_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    monkeypatch.setenv("KVXFER_TRTLLM", SETTINGS)
    fake_engine.install("older")
    yield importlib.import_module("kvxfer.connectors.trtllm").KvxferConnectorWorker
    fake_engine.uninstall()


def pool(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    shape = NUM_BLOCKS, NUM_LAYERS, 2, BLOCK_SIZE * 8
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def test_a_read_begins_behind_what_the_named_stream_was_given_before(
    worker_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_worker = importlib.import_module("kvxfer.connectors.trtllm.rank_worker")
    monkeypatch.setattr(rank_worker, "gpu_of", lambda tensor: 0)
    # Host memory that is declared as a GPU's: its worker has a stream, but no GPU.
    half = rank_worker.WorkerHalf
    monkeypatch.setattr(
        rank_worker,
        "WorkerHalf",
        lambda position, settings, stream: half(rank_worker.WorkerRank(position.engine_id), settings, stream),
    )
    monkeypatch.setattr(worker_class, "_engine_stream", lambda self: Recording())
    src, dst = pool(0), pool(1)
    before = dst.copy()
    prefill, decode = (worker_class(fake_engine.llm_args()) for _ in range(2))
    try:
        prefill.register_kv_caches(src)
        decode.register_kv_caches(dst)
        lease = kvxfer.LeaseToken.draw()
        stream, other = LateStream(), LateStream()
        prefill.bind_connector_meta(Step(grants=[Grant("1", (lease,), ((1, 2),))]))
        prefill.start_load_kv(stream)
        ranks = tuple(rank.agent for rank in prefill.registered.ranks)
        source = Handover("1", ranks, (lease,), ((1, 2),), (BLOCK_SIZE,), (1,), 2 * BLOCK_SIZE)
        decode.see_parked({7: object()})
        decode.bind_connector_meta(Step(fetches=[FetchOrder("7", source, ((5, 3),), 0, 2 * BLOCK_SIZE)]))
        decode.start_load_kv(other)
        assert decode.get_finished([], [7]) == ([], [])
        # The blocks belong to another request until its kernels have run.
        for _ in range(50):
            assert decode.get_finished([], []) == ([], [])
        assert np.array_equal(dst, before)
        other.run()
        until(lambda: decode.get_finished([], []) == ([], [7]), "the load")
        assert np.array_equal(dst[[4, 2]], src[[0, 1]])
        others = [0, 1, 3, 5, 6, 7]
        assert np.array_equal(dst[others], before[others])
        # The stream is read again in every call.
        for call in (
            decode.wait_for_save,
            partial(decode.save_kv_layer, 0),
            partial(decode.wait_for_layer_load, 0),
        ):
            call(stream)
            assert decode._stream.current is stream
    finally:
        prefill.shutdown()
        decode.shutdown()


def test_a_cache_that_is_registered_again_replaces_the_first(worker_class: Any) -> None:
    worker = worker_class(fake_engine.llm_args())
    try:
        worker.register_kv_caches(pool(0))
        first = worker.registered.ranks[0].agent
        worker.register_kv_caches(pool(1))
        assert worker.registered.ranks[0].agent != first
        with kvxfer.Agent("asks") as agent:
            with pytest.raises(kvxfer.KvxferError):
                agent.connect_blocking(first.address)
            assert agent.connect_blocking(worker.registered.ranks[0].agent)
    finally:
        worker.shutdown()


def test_the_scheduler_tells_of_the_cache_that_was_registered_last(worker_class: Any) -> None:
    args = fake_engine.llm_args()
    worker = worker_class(args)
    scheduler = importlib.import_module("kvxfer.connectors.trtllm").KvxferConnectorScheduler(args)
    try:
        for seed in range(2):
            worker.register_kv_caches(pool(seed))
            scheduler.build_connector_meta(None)
            assert scheduler._way.half._ranks == (worker.registered.ranks[0].agent,)
    finally:
        scheduler.shutdown()
        worker.shutdown()


def test_a_scheduler_without_a_worker_says_so(worker_class: Any) -> None:
    scheduler = importlib.import_module("kvxfer.connectors.trtllm").KvxferConnectorScheduler(
        fake_engine.llm_args()
    )
    with pytest.raises(RuntimeError, match="name both classes in KvCacheConnectorConfig"):
        scheduler.wait_for_initialization()


def test_a_cache_of_another_form_is_refused_in_words(worker_class: Any) -> None:
    worker = worker_class(fake_engine.llm_args())
    with pytest.raises(NotImplementedError, match=r"reads pools \[block, layer, kv, content\]"):
        worker.register_kv_caches(np.zeros((4, 4, 3, 8), np.uint8))
    assert worker._half is None


def test_a_cache_that_another_rank_cannot_register_is_refused_here(
    worker_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_class(fake_engine.llm_args(tp_size=2))
    utils = importlib.import_module("tensorrt_llm._utils")
    monkeypatch.setattr(utils, "mpi_allgather", lambda own: [own, "rank 1: no memory"])
    with pytest.raises(NotImplementedError, match="cannot be registered: rank 1: no memory"):
        worker.register_kv_caches(pool(0))
    assert worker._half is None


def test_orders_of_a_step_without_a_forward_are_not_lost(worker_class: Any) -> None:
    worker = worker_class(fake_engine.llm_args())
    try:
        worker.register_kv_caches(pool(0))
        rank = worker.registered.ranks[0].agent
        source = Handover("1", (rank,), (kvxfer.LeaseToken.draw(),), ((1,),), (4,), (1,), 4, keep_s=30.0)
        # Two steps are bound before the engine asks what has ended.
        worker.bind_connector_meta(Step(claimed=[Claimed("1", source)]))
        worker.bind_connector_meta(Step(claimed=[Claimed("2", source)]))
        worker.get_finished([], [])
        assert len(worker._half._heartbeats) == 2
    finally:
        worker.shutdown()


# ---- agreement --------------------------------------------------------------------------------


def test_ranks_are_through_when_all_are_and_have_failed_when_one_has() -> None:
    said: list[Said] = []
    ranks = [Agreement(lambda own: [own, *said]), Agreement(lambda own: [*said, own])]

    def reach(rank: int, **changes: Any) -> Said:
        given: dict[str, Any] = {
            "received": set(),
            "sent": set(),
            "failed": set(),
            "news": News(),
            "step": None,
        }
        return ranks[rank].reach(**{**given, **changes})

    said[:] = [Said(frozenset(), frozenset("s"), frozenset("f"), News(frozenset("n")))]
    step = Step(withdrawn=["w"])
    together = reach(0, received={"r"}, sent={"s"}, step=step)
    assert together == Said(frozenset(), frozenset("s"), frozenset("f"), News(frozenset("n")), step)
    said[:] = [Said(frozenset("r"), frozenset(), frozenset(), News())]
    # Earlier reports stay until all ranks have made them.
    assert reach(0).received == frozenset("r")
    assert reach(0).received == frozenset()
