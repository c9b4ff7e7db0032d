"""Worker halves of two engines in this process, on tensors of their own: no engine, no model."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvxfer.connectors.vllm.appointment import Appointment
from kvxfer.connectors.vllm.cache_groups import CacheGroup
from kvxfer.connectors.vllm.compute_stream import ComputeStream
from kvxfer.connectors.vllm.place import Place
from kvxfer.connectors.vllm.settings import Settings
from kvxfer.connectors.vllm.step import Chunk, FetchOrder, StepMetadata
from kvxfer.connectors.vllm.worker_half import StepResults, WorkerHalf
from kvxfer.directory import Entry
from tests.seeds import seed_of

NUM_HEADS, BLOCK_SIZE, NUM_LAYERS = 4, 32, 3
BOUND_S = 20.0
# Where a dozen agents share two cores, a silence of seconds is nobody's death.
PATIENCE: dict[str, Any] = {"connect_timeout_s": 15.0, "silent_timeout_s": 10.0}
LAYERS = tuple(f"layers.{layer}" for layer in range(NUM_LAYERS))


class Worker:
    """One worker half, and its layers' tensors, [block, ...], by name; closed at the end of a ``with``."""

    def __init__(
        self,
        place: Place,
        groups: tuple[CacheGroup, ...],
        caches: dict[str, torch.Tensor],
        stream: ComputeStream | None = None,
        **settings: Any,
    ) -> None:
        self.place, self.groups, self.caches = place, groups, caches
        self.half = WorkerHalf(place, groups, Settings(**settings), stream)
        self.half.register(caches)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.half.close()

    @property
    def rank(self) -> Entry:
        return self.half.rank.agent

    def pages(self, blocks: tuple[int, ...]) -> torch.Tensor:
        """Returns what lies in these blocks: [layer, block, ...]."""
        return torch.stack([tensor[list(blocks)] for tensor in self.caches.values()])

    def until(self, what: str, request_id: str, finished: set[str] | None = None) -> StepResults:
        """Steps as an engine does until a request is among the ``"sent"`` or ``"received"``."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            results = self.half.collect(finished or set())
            if request_id in getattr(results, what):
                return results
            self.half.before_forward(StepMetadata())
            self.half.step(StepMetadata())
        raise AssertionError(f"{request_id} is not among what was {what}")


@contextmanager
def workers(
    engine: str,
    tp_size: int = 1,
    pp_size: int = 1,
    num_blocks: int = 64,
    num_layers: int = NUM_LAYERS,
    block_size: int = BLOCK_SIZE,
    order: str = "LBHNC",
    packed_for: str = "these tests",
    cache_dtype: str = "auto",
    is_latent: bool = False,
    stream: ComputeStream | None = None,
    **settings: Any,
) -> Iterator[list[Worker]]:
    """Yields the workers of an engine; closes them in the end.

    A worker's layers lie in one tensor, in the `order` of its axes. Pages that are packed can be read
    by the like alone; others as their axes say. A latent cache is alike on every rank.
    """
    num_heads = 1 if is_latent else NUM_HEADS // tp_size
    spec = (MLAAttentionSpec if is_latent else FullAttentionSpec)(
        block_size=block_size, num_kv_heads=num_heads, head_size=8 if is_latent else 4, dtype=torch.float32
    )
    with ExitStack() as running:
        made = []
        for pp_rank, tp_rank in itertools.product(range(pp_size), range(tp_size)):
            first, stop = (num_layers * stage // pp_size for stage in (pp_rank, pp_rank + 1))
            group = CacheGroup(0, "kv.0", LAYERS[first:stop], spec, block_size, 0)
            place = Place(
                engine_id=engine,
                tp_rank=tp_rank,
                tp_size=tp_size,
                model="tiny",
                cache_dtype=cache_dtype,
                total_heads=1 if is_latent else NUM_HEADS,
                num_blocks=num_blocks,
                packed_for=packed_for,
                pp_rank=pp_rank,
                pp_size=pp_size,
                num_layers=num_layers if pp_size > 1 else 0,
            )
            sizes = {"L": stop - first, "B": num_blocks, "H": num_heads, "N": block_size, "C": 8}
            # Of fp8 the engine has bytes.
            dtype = torch.float32 if cache_dtype == "auto" else torch.uint8
            tensor = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
            tensor = tensor.permute(*map(order.index, "LBHNC"))
            caches = dict(zip(group.layer_names, tensor, strict=True))
            worker = Worker(place, (group,), caches, stream, **{**PATIENCE, **settings})
            made.append(running.enter_context(worker))
        yield made


@dataclass
class Pushed:
    """One prompt on its way from the workers of prefill to those of decode."""

    name: str
    src: tuple[int, ...]
    dst: tuple[int, ...]
    num_tokens: int
    key: bytes
    first_token: int = 0
    num_wanted: int = 0  # by decode; 0 for all
    block_sizes: tuple[int, int] = (BLOCK_SIZE, BLOCK_SIZE)  # of src, of dst

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
        """Returns one with scattered blocks, none of which another has that is under way as well."""
        random_ = random.Random(seed_of("pushed", seed))
        taken = ((), ()) if beside is None else (beside.src, beside.dst)
        src, dst = (
            tuple(random_.sample([*{*range(1, num_blocks)} - {*others}], -(-num_tokens // size)))
            for size, others in zip(block_sizes, taken, strict=True)
        )
        return cls(name, src, dst, num_tokens, random_.randbytes(16), block_sizes=block_sizes)

    def chunk(self, first: int, stop: int) -> StepMetadata:
        """Returns the step in which prefill computes some of its tokens."""
        table = self.src[: -(-stop // self.block_sizes[0])]
        return StepMetadata(
            chunks=[Chunk(self.name, self.key, "digest", (table,), first, stop, self.num_tokens)]
        )

    def order(self, prefill: list[Worker], prompt: str = "digest", waits: bool = False) -> StepMetadata:
        """Returns the step in which decode asks for it."""
        source = Appointment(self.key, tuple(worker.rank for worker in prefill), prompt)
        stop = self.num_wanted or self.num_tokens
        table = self.dst[: -(-stop // self.block_sizes[1])]
        return StepMetadata(fetches=[FetchOrder(self.name, source, (table,), self.first_token, stop, waits)])

    def compute(self, prefill: list[Worker], layer: int, first: int, stop: int, whole: torch.Tensor) -> None:
        """Writes a layer of some tokens where prefill's blocks are, as a forward would; all heads of it."""
        for worker in prefill:
            if (cache := worker.caches.get(LAYERS[layer])) is None:
                continue
            first_head = worker.place.tp_rank * cache.shape[1] % whole.shape[2]  # a latent is on all ranks
            for token in range(first, stop):
                block, within = self.src[token // self.block_sizes[0]], token % self.block_sizes[0]
                cache[block, :, within] = whole[layer, token, first_head : first_head + cache.shape[1]]

    def arrived(self, decode: list[Worker], layer: int) -> torch.Tensor:
        """Returns a layer of all of its tokens as decode's blocks hold it: [token, head, content]."""
        ranks = [worker.caches[LAYERS[layer]] for worker in decode if LAYERS[layer] in worker.caches]
        pages = [torch.cat([cache[block] for cache in ranks], dim=0) for block in self.dst]
        return torch.cat([page.transpose(0, 1) for page in pages])[: self.num_tokens]


def some_tokens(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Returns what a model would have computed: [layer, token, head, content]."""
    generator = torch.Generator().manual_seed(seed_of("tokens", seed))
    return torch.rand(NUM_LAYERS, num_tokens, NUM_HEADS, 8, generator=generator) + 1


def forward(prefill: list[Worker], pushed: Pushed, first: int, stop: int, whole: torch.Tensor) -> None:
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
        waiting = worker.half._pushes._registrations._waiting.get(pushed.key)
        if waiting is None or not waiting.arrivals:
            return False
    return True


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits, in a bounded time."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {BOUND_S} s"
        time.sleep(0.001)


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
