"""``kvxfer bench trigger`` and ``commands``: how soon what waits in an agent goes once it may.

A page over loopback between two agents of this process, so that no other one takes part.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Self

import numpy as np

import kvxfer
from kvxfer.bench.report.document import Part, Table, Words
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import Option, check

_PAGE_NBYTES = 4096
_NUM_PAGES = 1024
_TIMEOUT_S = 60.0
_LOOK_S = 0.0005
# Who the agent is that sees it: how long it spins, whether it is polled, and how long it has waited.
_AGENTS = {
    "asleep": (50, False, (0.001, 0.01, 0.1)),
    "spinning": (20_000, False, (0.001,)),
    "polled": (50, True, (0.001,)),
}

Rounds = Annotated[int, Option("How often to measure each delay.", at_least=1)]


@dataclass(frozen=True, slots=True)
class TriggerOptions:
    """Measure how soon a transfer starts after its trigger is satisfied, and what waiting costs.

    The delay is from the store to the trigger's word until the first piece of a read is in place.

    kvxfer bench trigger --rounds 200 --wait-s 1
    """

    rounds: Rounds = 1000
    wait_s: Annotated[float, Option("How long to measure waiting.", above=0)] = 5.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class CommandsOptions:
    """Measure the time of a command in a ring, beside that of a posted write.

    The time is from the call that posts it, as a kernel would, until the destination has confirmed its end.

    kvxfer bench commands --rounds 200
    """

    rounds: Rounds = 1000

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Delay:
    """What lies between two events, after a wait of so long; ``name`` says who acts, and who sees it."""

    name: str
    waited_us: float
    p50_us: float
    p90_us: float
    p99_us: float

    @classmethod
    def measured(cls, name: str, waited_s: float, measure: Callable[[], float], rounds: int) -> Self:
        """Measures so many, as time allows, after a tenth that is not counted."""
        rounds = min(rounds, max(20, int(10 / waited_s)))
        for _ in range(max(1, rounds // 10)):
            measure()
        found = np.percentile([measure() for _ in range(rounds)], [50, 90, 99]).round(1).tolist()
        return cls(name, waited_s * 1e6, *found)


class Pair:
    """Two agents of this process that are connected, each with a region of pages; ``with`` ends them."""

    def __init__(self, spin_us: int, gpu: int | None = None, *, both_spin: bool = False) -> None:
        names = ("loopback",) if gpu is None else ("loopback", "cuda_ipc")
        options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=names, gpu=gpu)
        spinning = replace(options, spin_us=spin_us)
        self.near = kvxfer.Agent("near", spinning)
        self.far = kvxfer.Agent("far", spinning if both_spin else options)
        pages = [np.zeros((_NUM_PAGES, _PAGE_NBYTES), np.uint8) for _ in range(2)]
        self.region, other = self.near.register("kv", pages[0]), self.far.register("kv", pages[1])
        there = self.near.connect_blocking(self.far.address, _TIMEOUT_S)
        here = self.far.accept_blocking("near", _TIMEOUT_S)
        for mode in ("read", "write"):
            other.grant(here, None, mode, ttl_s=10 * _TIMEOUT_S)
        self.remote = there.region_blocking("kv", _TIMEOUT_S)

    def read(self, after: Any, more_s: float = 0.0) -> kvxfer.Transfer:
        """Posts a read that waits for a trigger."""
        return self.near.read(self.region, self.remote, [0], [1], after=after, timeout_s=_TIMEOUT_S + more_s)

    def write(self, block: int = 0) -> kvxfer.Transfer:
        return self.near.write(self.region, self.remote, [block], [block], timeout_s=_TIMEOUT_S)

    def pause(self, waited_s: float, drive: bool) -> None:
        """Waits; polls the agent meanwhile if it is to be driven."""
        until = time.monotonic() + waited_s
        while (left := until - time.monotonic()) > 0:
            if drive:
                self.near.poll()
            else:
                time.sleep(left)

    def read_delay_us(
        self, after: Any, waited_s: float, store: Callable[[], int], drive: bool = False
    ) -> float:
        """Returns what lies between a store, which says when it was, and the first piece."""
        transfer = self.read(after)
        self.pause(waited_s, drive)
        stored_ns = store()
        while transfer.state == "pending":
            if drive:
                self.near.poll()
            else:
                time.sleep(_LOOK_S)  # a wait would drive, and see the word at once
        transfer.wait(_TIMEOUT_S)
        return (transfer.stages.first_piece_ns - stored_ns) / 1e3

    def ended_us(self, start: Callable[[], Callable[[], bool]], waited_s: float, drive: bool) -> float:
        """Returns what lies between a start, which returns a look at its end, and that end; after a pause."""
        self.pause(waited_s, drive)
        began = time.monotonic_ns()
        has_ended = start()
        while not has_ended():
            if drive:
                self.near.poll()
        return (time.monotonic_ns() - began) / 1e3

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.near.close()
        self.far.close()


def run_trigger(options: TriggerOptions, progress: Say) -> Message:
    """Runs it and returns ``delays``, and ``waiting_cores``: processors in use while a transfer waits."""

    def measure() -> Message:
        found = list(_delays(_by_host, options.rounds, progress))
        return {"delays": found, "waiting_cores": _waiting_cores(options.wait_s)}

    return result_of("trigger", options, measure)


def run_commands(options: CommandsOptions, progress: Say) -> Message:
    """Runs it and returns ``delays``, and ``per_s``: how many pages that go one by one end in a second."""
    return result_of(
        "commands",
        options,
        lambda: {"delays": list(_delays(_by_ring, options.rounds, progress)), "per_s": _rates()},
    )


def parts(result: Message) -> Iterator[Part]:
    """Yields what a result of either is shown as."""
    rows = [
        (
            each["name"],
            f"{each['waited_us']:.0f}",
            *(f"{each[f'{name}_us']:.1f}" for name in ("p50", "p90", "p99")),
        )
        for each in result["delays"]
    ]
    yield Table((result["bench"], "waited us", "p50 us", "p90", "p99"), rows)
    for name, value in result.get("waiting_cores", {}).items():
        yield Words(f"waiting for {name} takes {value:.2%} of a processor")
    for name, rate in result.get("per_s", {}).items():
        yield Words(f"{name} of a page of {_PAGE_NBYTES} bytes each: {rate:.0f} in a second")


#: What is measured with a pair: name -> a measurement after a wait, of an agent that is driven or not.
_Measurements = dict[str, Callable[[float, bool], float]]


def _delays(measurements: Callable[[Pair], _Measurements], rounds: int, progress: Say) -> Iterator[Message]:
    for done, (who, (spin_us, drive, waits)) in enumerate(_AGENTS.items()):
        progress(Progress(done, len(_AGENTS), f"an agent that is {who}"))
        with Pair(spin_us, both_spin=measurements is _by_ring) as pair:
            for waited_s, (what, measure) in itertools.product(waits, measurements(pair).items()):
                once = functools.partial(measure, waited_s, drive)
                yield asdict(Delay.measured(f"{what}, {who}", waited_s, once, rounds))


def _by_host(pair: Pair) -> _Measurements:
    """Stores of this process to a trigger's word, announced and not."""
    word = np.zeros(1, np.uint32)
    stored, fired = pair.near.trigger(word), pair.near.trigger()

    def store() -> int:
        at = time.monotonic_ns()
        word[0] = 1
        return at

    def fire() -> int:
        at = time.monotonic_ns()
        fired.fire()
        return at

    def by(trigger: kvxfer.Trigger, action: Callable[[], int]) -> Callable[[float, bool], float]:
        def measure(waited_s: float, drive: bool) -> float:
            trigger.reset()
            return pair.read_delay_us(trigger, waited_s, action, drive)

        return measure

    return {"store": by(stored, store), "fire()": by(fired, fire)}


def _by_ring(pair: Pair) -> _Measurements:
    """A command in a ring, and a write that is posted."""
    ring, prepared = _ring(pair)

    def start() -> Callable[[], bool]:
        before = ring.num_ended
        ring.start(prepared, 0)
        return lambda: ring.num_ended != before

    def post() -> Callable[[], bool]:
        transfer = pair.write()
        return lambda: transfer.state != "pending"

    return {
        "command": lambda waited_s, drive: pair.ended_us(start, waited_s, drive),
        "write()": lambda waited_s, drive: pair.ended_us(post, waited_s, drive),
    }


def _ring(pair: Pair) -> tuple[Any, Any]:
    blocks = np.arange(_NUM_PAGES, dtype=np.uint32)
    ring = pair.near.command_ring()
    return ring, ring.prepare_write(pair.region, pair.remote, blocks, blocks)


def _rates() -> dict[str, float]:
    with Pair(50) as pair:
        ring, prepared = _ring(pair)

        def commands() -> None:
            first = ring.num_ended
            for page in range(_NUM_PAGES):
                while not ring.start(prepared, page):
                    pair.near.poll()
            ring.ended_blocking(first + _NUM_PAGES, _TIMEOUT_S)

        def writes() -> None:
            for transfer in [pair.write(block) for block in range(_NUM_PAGES)]:
                transfer.wait(_TIMEOUT_S)

        def rate(work: Callable[[], None]) -> float:
            began = time.monotonic()
            work()
            return _NUM_PAGES / (time.monotonic() - began)

        works = {"commands": commands, "writes": writes}
        return {name: float(np.median([rate(work) for _ in range(9)])) for name, work in works.items()}


def _waiting_cores(seconds: float) -> dict[str, float]:
    """Returns processors in use while a transfer waits for a store, for fire() and for nothing."""
    cores = {}
    with Pair(50) as pair:
        for name in ("store", "fire()", "nothing"):
            trigger = pair.near.trigger(np.zeros(1, np.uint32) if name == "store" else None)
            if name == "nothing":
                trigger.fire()
            transfer = pair.read(trigger, seconds)
            time.sleep(0.1)
            before = time.process_time()
            time.sleep(seconds)
            cores[name] = round((time.process_time() - before) / seconds, 4)
            trigger.fire()
            transfer.wait(_TIMEOUT_S)
    return cores


def by_stream(gpu: int, rounds: int) -> Iterator[Delay]:
    """Yields delays where an idle stream of a GPU stores, to an agent that sleeps and to one that spins.

    From the call that enqueues the store, and from when this thread sees what the stream stored just before.
    """
    for who, spin_us in (("asleep", 50), ("spinning", 20_000)):
        with Pair(spin_us, gpu) as pair:
            for name, measure in _by_gpu(pair, gpu).items():
                yield Delay.measured(f"{name}, {who}", 0.001, measure, rounds)


def _by_gpu(pair: Pair, gpu: int) -> dict[str, Callable[[], float]]:
    import torch

    stream = torch.cuda.Stream(gpu)
    before, trigger = pair.near.trigger(), pair.near.trigger()

    def call() -> int:
        at = time.monotonic_ns()
        trigger.record(stream)
        return at

    def see() -> int:
        before.record(stream)
        trigger.record(stream)
        while before.value == 0:
            pass
        return time.monotonic_ns()

    def measure(store: Callable[[], int]) -> float:
        stream.synchronize()
        before.reset()
        trigger.reset()
        return pair.read_delay_us(trigger, 0.001, store)

    return {"record()": functools.partial(measure, call), "store": functools.partial(measure, see)}
