"""``python -m kvxfer.bench.latency.trigger``: how soon a transfer goes once its trigger is satisfied.

A read over loopback, so that no other process takes part: from the store to the word until the first piece is
in place. And what waiting takes of a processor. `gpu_check` has the same from a stream.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

import kvxfer

_PAGE_NBYTES = 4096
_TIMEOUT_S = 60.0
_LOOK_S = 0.0005


@dataclass(frozen=True, slots=True)
class Delay:
    """From a store to the first piece in place, after a wait of so long.

    Attributes
    ----------
    name
        Who stores, and who drives.
    waited_us
        Between the post and the store.
    """

    name: str
    waited_us: float
    p50_us: float
    p90_us: float
    p99_us: float


class Reader:
    """Two agents of this process, of which one reads a page of the other's when it may."""

    def __init__(self, spin_us: int, gpu: int | None = None) -> None:
        names = ("loopback",) if gpu is None else ("loopback", "cuda_ipc")
        options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=names, gpu=gpu)
        self.src = kvxfer.Agent("src", options)
        self.dst = kvxfer.Agent("dst", replace(options, spin_us=spin_us))
        pages = [np.zeros((2, _PAGE_NBYTES), np.uint8) for _ in range(2)]
        source, self._region = self.src.register("kv", pages[0]), self.dst.register("kv", pages[1])
        there = self.src.connect_blocking(self.dst.address, _TIMEOUT_S)
        source.grant(there, None, "read", ttl_s=_TIMEOUT_S)
        here = self.dst.accept_blocking("src", _TIMEOUT_S)
        self._remote = here.region_blocking("kv", _TIMEOUT_S)

    def delay_us(self, after: Any, waited_s: float, store: Callable[[], int], drive: bool = False) -> float:
        """Returns what lies between a store, which says when it was, and the first piece."""
        transfer = self.dst.read(self._region, self._remote, [0], [1], after=after, timeout_s=_TIMEOUT_S)
        until = time.monotonic() + waited_s
        while (left := until - time.monotonic()) > 0:
            if drive:
                self.dst.poll()
            else:
                time.sleep(left)
        stored_ns = store()
        while transfer.state == "pending":
            if drive:
                self.dst.poll()
            else:
                time.sleep(_LOOK_S)  # a wait would drive, and see the word at once
        transfer.wait(_TIMEOUT_S)
        return (transfer.stages.first_piece_ns - stored_ns) / 1e3

    def close(self) -> None:
        self.src.close()
        self.dst.close()


def delays(name: str, waited_s: float, measure: Callable[[], float], rounds: int) -> Delay:
    """Returns percentiles of so many, after a tenth that is not counted."""
    for _ in range(max(1, rounds // 10)):
        measure()
    found = np.percentile([measure() for _ in range(rounds)], [50, 90, 99])
    return Delay(name, waited_s * 1e6, *(round(float(value), 1) for value in found))


def by_host(rounds: int) -> list[Delay]:
    """Returns delays of stores, announced and not, to agents that sleep, spin or are polled."""
    found = []
    for spin_us, drive, waits in (
        (50, False, (0.001, 0.01, 0.1)),
        (20_000, False, (0.001,)),
        (50, True, (0.001,)),
    ):
        reader = Reader(spin_us)
        word = np.zeros(1, np.uint32)
        stored = reader.dst.trigger(word)
        fired = reader.dst.trigger()

        def store(word: Any = word) -> int:
            at = time.monotonic_ns()
            word[0] = 1
            return at

        def fire(fired: kvxfer.Trigger = fired) -> int:
            at = time.monotonic_ns()
            fired.fire()
            return at

        who = "polled" if drive else "spinning" if spin_us > 1000 else "asleep"
        for waited_s in waits:
            for name, trigger, action in ((f"store, {who}", stored, store), (f"fire(), {who}", fired, fire)):

                def measure(
                    reader: Reader = reader,
                    trigger: kvxfer.Trigger = trigger,
                    action: Callable[[], int] = action,
                    waited_s: float = waited_s,
                    drive: bool = drive,
                ) -> float:
                    trigger.reset()
                    return reader.delay_us(trigger, waited_s, action, drive)

                found.append(delays(name, waited_s, measure, min(rounds, max(20, int(10 / waited_s)))))
        reader.close()
    return found


def by_stream(gpu: int, rounds: int) -> list[Delay]:
    """Returns delays where an idle stream of a GPU stores, to an agent that sleeps and to one that spins.

    Once from the call that enqueues the store, and once from when this thread has seen a word to which the
    same stream stored just before.
    """
    import torch

    stream = torch.cuda.Stream(gpu)
    found = []
    for who, spin_us in (("asleep", 50), ("spinning", 20_000)):
        reader = Reader(spin_us, gpu)
        before, trigger = reader.dst.trigger(), reader.dst.trigger()

        def call(before: kvxfer.Trigger = before, trigger: kvxfer.Trigger = trigger) -> int:
            at = time.monotonic_ns()
            trigger.record(stream)
            return at

        def see(before: kvxfer.Trigger = before, trigger: kvxfer.Trigger = trigger) -> int:
            before.record(stream)
            trigger.record(stream)
            while before.value == 0:
                pass
            return time.monotonic_ns()

        for name, action in ((f"record(), {who}", call), (f"store, {who}", see)):

            def measure(
                before: kvxfer.Trigger = before,
                trigger: kvxfer.Trigger = trigger,
                reader: Reader = reader,
                action: Callable[[], int] = action,
            ) -> float:
                stream.synchronize()
                before.reset()
                trigger.reset()
                return reader.delay_us(trigger, 0.001, action)

            found.append(delays(name, 0.001, measure, rounds))
        reader.close()
    return found


def waiting_cores(seconds: float) -> dict[str, float]:
    """Returns processors in use while a transfer waits for a store, for fire() and for nothing."""
    cores = {}
    reader = Reader(50)
    for name in ("store", "fire()", "nothing"):
        trigger = reader.dst.trigger(np.zeros(1, np.uint32) if name == "store" else None)
        if name == "nothing":
            trigger.fire()
        transfer = reader.dst.read(
            reader._region, reader._remote, [0], [1], after=trigger, timeout_s=_TIMEOUT_S + seconds
        )
        time.sleep(0.1)
        before = _processor_s()
        time.sleep(seconds)
        cores[name] = round((_processor_s() - before) / seconds, 4)
        trigger.fire()
        transfer.wait(_TIMEOUT_S)
    reader.close()
    return cores


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def print_delays(rows: list[Delay]) -> None:
    """Prints a table with a line for each."""
    print(f"{'':24}{'waited us':>12}{'p50 us':>10}{'p90':>10}{'p99':>10}")
    for row in rows:
        print(f"{row.name:24}{row.waited_us:12.0f}{row.p50_us:10.1f}{row.p90_us:10.1f}{row.p99_us:10.1f}")


def main() -> None:
    """Prints a line for each delay, and what waiting costs; with ``--json`` one object."""
    parser = argparse.ArgumentParser(prog="python -m kvxfer.bench.latency.trigger", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="of each delay")
    parser.add_argument("--wait-s", type=float, default=5.0, help="how long waiting is measured")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, cores = by_host(options.rounds), waiting_cores(options.wait_s)
    if options.json:
        print(
            json.dumps({"bench": "trigger", "delays": [asdict(row) for row in rows], "waiting_cores": cores})
        )
        return
    print_delays(rows)
    for name, value in cores.items():
        print(f"waiting for {name}: {value:.2%} of a processor")


if __name__ == "__main__":
    main()
