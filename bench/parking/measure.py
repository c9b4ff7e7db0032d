"""``kvxfer bench parking``: pages into the daemon's pool and out of it, beside a plain copy of its memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

import kvxfer
from kvxfer.bench import _limits
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.parking import engine_end
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, figures_table
from kvxfer.bench.run import memory
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import Option, Seed, check
from kvxfer.bench.run.process import Worker
from kvxfer.bench.run.stats import MIB, median_ratio, spread
from kvxfer.control.host_pool.page import Salt
from kvxfer.control.host_pool.page_pool import PagePool
from kvxfer.control.own.own_agent import OwnAgent, RemoteRegion
from kvxfer.errors import invalid
from kvxfer.options import default_copy_threads

FIGURES = {
    "park_gb_s": "writes an engine's pages into the pool, until acknowledged: one call of the pool",
    "fetch_gb_s": "reads the same pages from the pool, from the request for a lease to the end of the read",
    "read_gb_s": "the same pages in one read into memory with the engine's own layout, without a pool",
    "copy_gb_s": "a plain copy of as many bytes between two parts of the pool's memory, page by page",
    "copy_nt_gb_s": "the same with non-temporal stores and as many threads as agents copy with",
    "park_read_ratio": "park / read of the same iteration, median",
    "fetch_read_ratio": "fetch / read of the same iteration, median",
    "park_ratio": "park / plain copy of the same iteration, median",
    "fetch_ratio": "fetch / plain copy of the same iteration, median",
    "park_nt_ratio": "park / copy with non-temporal stores, median",
    "fetch_nt_ratio": "fetch / copy with non-temporal stores, median",
}
_ORDERS = {"layers": "l2bthd", "blocks": "bl2thd"}
_SUFFIXES = {"read": "_read", "copy": "", "copy_nt": "_nt"}
_SALT = Salt("bench", "model", "1")


@dataclass(frozen=True, slots=True)
class ParkingOptions:
    """Park an engine's pages in a daemon's pool and fetch them again, beside a plain copy.

    kvxfer bench parking --memory foreign --order blocks
    """

    total_mib: Annotated[int, Option("Bytes that one call parks.", at_least=1)] = 256
    layers: Annotated[int, Option("Layers of the cache.", at_least=1)] = 32
    heads: Annotated[int, Option("KV heads, each of 128 bfloat16; pages have 16 tokens.", at_least=1)] = 8
    order: Annotated[str, Option("The outermost axis of the engine's memory.", one_of=tuple(_ORDERS))] = (
        "layers"
    )
    memory: Annotated[
        str,
        Option(
            "The engine's memory: a pool of kvxfer, or tensors that it allocated.", one_of=("pool", "foreign")
        ),
    ] = "pool"
    transport: Annotated[str, Option("The transport.", one_of=("shm", "tcp"))] = "shm"
    iterations: Annotated[int, Option("How often to measure each, in turns.", at_least=1)] = 7
    copy_threads: Annotated[int, Option("Copy threads of each agent; 0: its default.", at_least=0)] = 0
    slabs: Annotated[
        int, Option("Number of the pool's slabs that hold the pages of one call.", at_least=1)
    ] = 1
    seed: Seed = 1

    def __post_init__(self) -> None:
        check(self)
        if self.slabs > self.num_pages:
            raise invalid(f"{self.num_pages} pages cannot lie in {self.slabs} slabs: use fewer slabs")

    @property
    def page_nbytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.layers * 2 * 16 * self.heads * 128 * 2

    @property
    def num_pages(self) -> int:
        """How many pages one call parks."""
        return max(self.total_mib * MIB // self.page_nbytes, 1)


def run(options: ParkingOptions, progress: Say) -> Message:
    """Runs it and returns the result (`FIGURES`) as one JSON object."""
    return result_of("parking", options, lambda: asyncio.run(_measure(options, progress)))


def parts(result: Message) -> Iterator[Part]:
    """Yields the parts that show a result."""
    yield shown.arguments(result, *FIGURES)
    yield figures_table(result, FIGURES)


async def _measure(options: ParkingOptions, progress: Say) -> Message:
    num_pages, threads = options.num_pages, options.copy_threads or default_copy_threads()
    sizes = {"l": options.layers, "2": 2, "b": 2 * num_pages, "t": 16, "h": options.heads, "d": 128}
    axes = _ORDERS[options.order]
    fields = {
        "axes": axes,
        "shape": [sizes[axis] for axis in axes],
        "memory": options.memory,
        "transport": options.transport,
        "copy_threads": threads,
    }
    own = OwnAgent(
        "bench",
        kvxfer.AgentOptions(
            transports=(options.transport,), copy_threads=threads, silent_timeout_s=30.0, secret=b""
        ),
    )
    nbytes = num_pages * options.page_nbytes
    slab_nbytes = -(-num_pages // options.slabs) * options.page_nbytes
    pool = PagePool(own, options.slabs * slab_nbytes, slab_nbytes=slab_nbytes)
    chance = np.random.default_rng(options.seed)
    rates: dict[str, list[float]] = {name: [] for name in ("park", "fetch", "read", "copy", "copy_nt")}
    copy = _Copy(num_pages, options.page_nbytes, chance)
    shape = [num_pages if axis == "b" else sizes[axis] for axis in axes]
    like = copy.into.view(np.uint16).reshape(shape)
    own.register("like", like, kvxfer.KVLayout.from_tensor(like, axes, dtype="bfloat16"))
    try:
        with Worker(f"{engine_end.__name__.removeprefix('kvxfer.bench.')}:EngineEnd", fields) as engine:
            for iteration in range(-1, options.iterations):  # the first round faults memory in
                progress(Progress(max(iteration, 0), options.iterations, "park, fetch, copy"))
                took = await _once(options, own, pool, engine, chance, iteration)
                took |= copy.run(threads)
                if iteration >= 0:
                    for name, elapsed_ns in took.items():
                        rates[name].append(nbytes / elapsed_ns)
    finally:
        await pool.aclose()
        await own.aclose()
    ratios = {
        f"{name}{_SUFFIXES[kind]}_ratio": median_ratio(rates[name], rates[kind])
        for name in ("park", "fetch")
        for kind in _SUFFIXES
    }
    return {
        "page_nbytes": options.page_nbytes,
        "num_pages": num_pages,
        "page_kind": pool.stats().page_kind,
        **{f"{name}_gb_s": spread(found) for name, found in rates.items()},
        **ratios,
    }


async def _once(
    options: ParkingOptions,
    own: OwnAgent,
    pool: PagePool,
    engine: Worker,
    chance: np.random.Generator,
    iteration: int,
) -> dict[str, int]:
    """Parks half of the engine's blocks, fetches them into the other half, drops them, and reads them."""
    place = engine.call("place")
    token = kvxfer.LeaseToken.parse(place["token"])
    source, into = np.split(chance.permutation(2 * options.num_pages), 2)
    sums = engine.call("sums", blocks=source.tolist())["sums"]
    engine.call("clear", blocks=into.tolist())
    names = [f"{iteration}.{number}" for number in range(len(source))]
    started = time.perf_counter_ns()
    parked = await pool.park(
        _SALT, RemoteRegion("engine", "kv", place["address"]), source.tolist(), names, lease=token
    )
    took = {"park": time.perf_counter_ns() - started}
    into_of = dict(zip(parked.new, into.tolist(), strict=True))
    started = time.perf_counter_ns()
    leased = pool.lease(parked.new, "engine", 60.0)
    told = [
        [
            part.region.to_bytes().decode(),
            str(part.token),
            part.blocks,
            [into_of[key] for key in part.keys],
        ]
        for part in leased.parts
    ]
    leased_ns = time.perf_counter_ns() - started
    # In a thread, because the loop serves the pool meanwhile.
    fetched = await asyncio.to_thread(engine.call, "fetch", parts=told)
    took["fetch"] = leased_ns + fetched["elapsed_ns"]
    if engine.call("sums", blocks=into.tolist())["sums"] != sums:
        raise CheckFailedError("the fetched pages differ from the parked ones")
    await pool.drop(parked.new)
    remote = await own.remote_region(RemoteRegion("engine", "kv", place["address"]))
    started = time.perf_counter_ns()
    await own.read("like", remote, source.tolist(), chance.permutation(options.num_pages), lease=token)
    return took | {"read": time.perf_counter_ns() - started}


class _Copy:
    """Copies as many pages between two parts of a pool's memory, by the shortest code possible."""

    def __init__(self, num_pages: int, page_nbytes: int, chance: np.random.Generator) -> None:
        self._pool = kvxfer.Pool(2 * num_pages, page_nbytes, name="bench-copy")
        self._source, self.into = (self._pool.array(num_pages * page_nbytes) for _ in range(2))
        self._source[:] = 1

        def offsets() -> NDArray[np.uint64]:
            return (chance.permutation(num_pages) * page_nbytes).astype(np.uint64)

        self._offsets = offsets(), offsets()
        self._page_nbytes = page_nbytes

    def run(self, threads: int) -> dict[str, int]:
        """Copies in both ways, and returns the nanoseconds of each."""
        into, source = memory.address_of(self.into), memory.address_of(self._source)
        to, of = self._offsets
        return {
            "copy": _limits.copy_pages(into, source, to, of, self._page_nbytes),
            "copy_nt": _limits.copy_pages_nt(into, source, to, of, self._page_nbytes, threads=threads),
        }
