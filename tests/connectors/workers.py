"""Worker halves of two engines in this process, on arrays of their own: no engine, no model."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import KVLayout, LeaseToken
from kvxfer.connectors.common import heartbeats, kept_blocks, pushes
from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.compute_stream import ComputeStream
from kvxfer.connectors.common.expected_push import ExpectedPush
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.regions import CacheMemory
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.step import Chunk, FetchOrder, Grant, Step
from kvxfer.connectors.common.worker_half import StepResults, WorkerHalf
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.directory import Entry
from tests.seeds import seed_of
from tests.waiting import until

NUM_HEADS, BLOCK_SIZE, NUM_LAYERS = 4, 32, 3
BOUND_S = 20.0
# If a dozen agents share two cores, a peer that is silent for seconds is not lost.
PATIENCE: dict[str, Any] = {"connect_timeout_s": 15.0, "silent_timeout_s": 10.0}
LAYERS = tuple(f"layers.{layer}" for layer in range(NUM_LAYERS))


Array = NDArray[Any]


class Clock:
    """The clock of both engines: it stands still until a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (heartbeats, kept_blocks, pushes):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now


class Worker:
    """One worker half, and its layers' arrays, [block, ...], by name; closed at the end of a ``with``."""

    def __init__(
        self,
        position: WorkerRank,
        memory: list[CacheMemory],
        caches: dict[str, Array],
        stream: ComputeStream | None = None,
        **settings: Any,
    ) -> None:
        self.position, self.caches, self.memory = position, caches, memory
        self.half = WorkerHalf(position, Settings(**settings), stream)
        self.half.register(memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.half.close()

    @property
    def rank(self) -> Entry:
        return self.half.rank.agent

    def pages(self, blocks: tuple[int, ...]) -> Array:
        """Returns what lies in these blocks: [layer, block, ...]."""
        return np.stack([cache[list(blocks)] for cache in self.caches.values()])

    def until(self, what: str, request_id: str, finished: set[str] | None = None) -> StepResults:
        """Steps as an engine does until a request is among the ``"sent"`` or ``"received"`` ones."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            results = self.half.collect(finished or set())
            if request_id in getattr(results, what):
                return results
            self.half.before_forward(Step())
            self.half.step(Step())
        raise AssertionError(f"{request_id} is not among what was {what}")


def memory_of(
    caches: dict[str, Array], position: WorkerRank, num_heads: int = NUM_HEADS, num_layers: int = 0
) -> list[CacheMemory]:
    """Returns where a worker's caches lie, [block, head, token, content]: some heads of some layers."""
    names, arrays = tuple(caches), list(caches.values())
    _, held, block_size, _ = arrays[0].shape
    stage: dict[str, Any] = {}
    if num_layers:
        stage = {
            "first_layer": num_layers * position.pp_rank // position.pp_size,
            "total_layers": num_layers,
        }
    layout = KVLayout.from_tensors(
        arrays,
        "bhtc",
        first_head=position.tp_rank * held,
        total_heads=num_heads,
        null_block=0,
        model="tiny",
        group="kv.0",
        **stage,
    )
    return [CacheMemory(CacheGroup(0, "kv.0", names, block_size), arrays, layout)]


@contextmanager
def workers(
    engine: str,
    tp_size: int = 1,
    pp_size: int = 1,
    num_blocks: int = 64,
    num_layers: int = NUM_LAYERS,
    stream: ComputeStream | None = None,
    **settings: Any,
) -> Iterator[list[Worker]]:
    """Yields the workers of an engine; closes them in the end. A worker's layers lie in one array."""
    with ExitStack() as running:
        made = []
        for pp_rank, tp_rank in itertools.product(range(pp_size), range(tp_size)):
            first, stop = (num_layers * stage // pp_size for stage in (pp_rank, pp_rank + 1))
            position = WorkerRank(engine, tp_rank, tp_size, pp_rank, pp_size)
            shape = stop - first, num_blocks, NUM_HEADS // tp_size, BLOCK_SIZE, 8
            caches = dict(zip(LAYERS[first:stop], np.zeros(shape, np.float32), strict=True))
            memory = memory_of(caches, position, num_layers=num_layers if pp_size > 1 else 0)
            made.append(
                running.enter_context(Worker(position, memory, caches, stream, **{**PATIENCE, **settings}))
            )
        yield made


@dataclass
class Pushed:
    """One prompt that moves from the workers of prefill to those of decode."""

    name: str
    src: tuple[int, ...]
    dst: tuple[int, ...]
    num_tokens: int
    key: bytes
    first_token: int = 0
    num_wanted: int = 0  # by decode; 0 for all
    block_sizes: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE)  # of src, of dst
    readers: tuple[str, ...] = ()

    @classmethod
    def draw(
        cls,
        name: str,
        num_tokens: int,
        seed: int = 0,
        num_blocks: int = 64,
        block_sizes: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE),
        beside: Pushed | None = None,
    ) -> Pushed:
        """Returns a prompt with scattered blocks that no other running prompt has."""
        random_ = random.Random(seed_of("pushed", seed))
        taken = ((), ()) if beside is None else (beside.src, beside.dst)
        src, dst = (
            tuple(random_.sample([*{*range(1, num_blocks)} - {*others}], -(-num_tokens // size)))
            for size, others in zip(block_sizes, taken, strict=True)
        )
        return cls(name, src, dst, num_tokens, random_.randbytes(16), block_sizes=block_sizes)

    def chunk(self, first: int, stop: int) -> Step:
        """Returns the step in which prefill computes some of its tokens."""
        table = self.src[: -(-stop // self.block_sizes[0])]
        chunk = Chunk(self.name, self.key, "digest", (table,), first, stop, self.num_tokens, self.readers)
        return Step(chunks=[chunk])

    def order(
        self,
        prefill: list[Worker],
        prompt: str = "digest",
        waits: bool = False,
        may_be_shared: bool = False,
    ) -> Step:
        """Returns the step in which decode requests it."""
        source = ExpectedPush(self.key, tuple(worker.rank for worker in prefill), prompt, may_be_shared)
        stop = self.num_wanted or self.num_tokens
        table = self.dst[: -(-stop // self.block_sizes[1])]
        return Step(fetches=[FetchOrder(self.name, source, (table,), self.first_token, stop, waits)])

    def compute(self, prefill: list[Worker], layer: int, first: int, stop: int, whole: Array) -> None:
        """Writes a layer of some tokens where prefill's blocks are, as a forward would; all heads of it."""
        for worker in prefill:
            if (cache := worker.caches.get(LAYERS[layer])) is None:
                continue
            first_head = worker.position.tp_rank * cache.shape[1] % whole.shape[2]  # a latent is on all ranks
            for token in range(first, stop):
                block, within = self.src[token // self.block_sizes[0]], token % self.block_sizes[0]
                cache[block, :, within] = whole[layer, token, first_head : first_head + cache.shape[1]]

    def arrived(self, decode: list[Worker], layer: int) -> Array:
        """Returns one layer of all its tokens from decode's blocks: [token, head, content]."""
        ranks = [worker.caches[LAYERS[layer]] for worker in decode if LAYERS[layer] in worker.caches]
        pages = [np.concatenate([cache[block] for cache in ranks]) for block in self.dst]
        return np.concatenate([page.swapaxes(0, 1) for page in pages])[: self.num_tokens]


def some_tokens(num_tokens: int, seed: int = 0) -> Array:
    """Returns what a model would have computed: [layer, token, head, content]."""
    generator = np.random.default_rng(seed_of("tokens", seed))
    return generator.random((NUM_LAYERS, num_tokens, NUM_HEADS, 8), np.float32) + 1


def forward(prefill: list[Worker], pushed: Pushed, first: int, stop: int, whole: Array) -> None:
    """Does one step that computes a chunk."""
    for worker in prefill:
        worker.half.before_forward(pushed.chunk(first, stop))
    for layer, name in enumerate(LAYERS):
        pushed.compute(prefill, layer, first, stop, whole)
        for worker in prefill:
            worker.half.layer_done(name)
    for worker in prefill:
        worker.half.after_forward(whole=True)
        worker.half.collect(set())


def prefill_knows(prefill: list[Worker], pushed: Pushed) -> bool:
    """Whether a registration waits at every worker of prefill."""
    for worker in prefill:
        worker.half.collect(set())
        assert worker.half._pushes is not None
        waiting = worker.half._pushes._registrations._keys.get(pushed.key, {})
        if not any(each.arrivals for each in waiting.values()):
            return False
    return True


def register(pushed: Pushed, prefill: list[Worker], decode: list[Worker]) -> None:
    """Has decode request the prompt, and waits until its session is open and its registration has arrived."""
    decode[0].half.step(pushed.order(prefill))
    until(lambda: bool(decode[0].half.collect(set())) and prefill_knows(prefill, pushed), "registration")


def collected(workers: list[Worker], finished: set[str] | None = None) -> list[StepResults]:
    """Steps every worker until each has reported something; returns what they did."""
    results: list[StepResults | None] = [None] * len(workers)

    def all_have() -> bool:
        for at, worker in enumerate(workers):
            if results[at] is None:
                result = worker.half.collect(finished or set())
                if result.sent or result.received:
                    results[at] = result
        return None not in results

    until(all_have, "a report of every worker")
    return [result for result in results if result is not None]


def require_received(decode: list[Worker], request_ids: set[str]) -> None:
    """Waits until every worker of decode reports something, which must be these requests."""
    for result in collected(decode):
        assert result.received == request_ids
        assert not result.failed


def order_of(pushed: Pushed, prefill: list[Worker]) -> Step:
    """Grants leases of prefill's blocks, and returns the step in which decode reads them."""
    lease = LeaseToken.draw()
    for worker in prefill:
        worker.half.step(Step(grants=[Grant(pushed.name, (lease,), (pushed.src,))]))
    handover = Handover(
        pushed.name,
        tuple(worker.rank for worker in prefill),
        (lease,),
        (pushed.src,),
        (pushed.block_sizes[0],),
        (1,),
        pushed.num_tokens,
    )
    order = FetchOrder(pushed.name, handover, (pushed.dst,), pushed.first_token, pushed.num_tokens)
    return Step(fetches=[order])


def pull(pushed: Pushed, prefill: list[Worker], decode: list[Worker]) -> None:
    """Hands the prompt over; returns when decode has it and prefill has its blocks back."""
    step = order_of(pushed, prefill)
    for worker in decode:
        worker.half.step(step)
    require_received(decode, {pushed.name})
    for result in collected(prefill, {pushed.name}):
        assert result.sent == {pushed.name}
