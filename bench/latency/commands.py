"""``python -m kvxfer.bench.latency.commands``: what a command in a ring takes, beside a write that is posted.

A page over loopback, so that no other process takes part. A thread posts to the ring as a kernel would; from
that call until the command has ended, which the destination has confirmed. `gpu_check` has it from a kernel.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

import kvxfer
from kvxfer.bench.latency.trigger import Delay, delays, print_delays

_PAGE_NBYTES = 4096
_NUM_PAGES = 1024
_TIMEOUT_S = 60.0


class Writer:
    """Two agents of this process, and a ring that writes pages of the one's to the other's."""

    def __init__(self, spin_us: int) -> None:
        options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=("loopback",), spin_us=spin_us)
        self.src, self.dst = (kvxfer.Agent(name, options) for name in ("src", "dst"))
        pages = [np.zeros((_NUM_PAGES, _PAGE_NBYTES), np.uint8) for _ in range(2)]
        self.region, target = self.src.register("kv", pages[0]), self.dst.register("kv", pages[1])
        there = self.src.connect_blocking(self.dst.address, _TIMEOUT_S)
        target.grant(self.dst.accept_blocking("src", _TIMEOUT_S), None, "write", ttl_s=10 * _TIMEOUT_S)
        self.remote = there.region_blocking("kv", _TIMEOUT_S)
        self.blocks = np.arange(_NUM_PAGES, dtype=np.uint32)
        self.ring = self.src.command_ring()
        self.prepared = self.ring.prepare_write(self.region, self.remote, self.blocks, self.blocks)

    def command_us(self, waited_s: float, drive: bool) -> float:
        """Returns what lies between a command and its end, after a pause."""
        self._pause(waited_s, drive)
        before = self.ring.num_ended
        began = time.monotonic_ns()
        self.ring.start(self.prepared, 0)
        while self.ring.num_ended == before:
            if drive:
                self.src.poll()
        return (time.monotonic_ns() - began) / 1e3

    def write_us(self, waited_s: float, drive: bool) -> float:
        """Returns what lies between the call of a write and its end, after a pause."""
        self._pause(waited_s, drive)
        began = time.monotonic_ns()
        transfer = self.src.write(self.region, self.remote, [0], [0], timeout_s=_TIMEOUT_S)
        while transfer.state == "pending":
            if drive:
                self.src.poll()
        return (time.monotonic_ns() - began) / 1e3

    def commands_per_s(self) -> float:
        """Returns how many commands of a page each end in a second, posted as fast as there is room."""
        first = self.ring.num_ended
        began = time.monotonic()
        for pair in range(_NUM_PAGES):
            while not self.ring.start(self.prepared, pair):
                self.src.poll()
        self.ring.ended_blocking(first + _NUM_PAGES, _TIMEOUT_S)
        return _NUM_PAGES / (time.monotonic() - began)

    def writes_per_s(self) -> float:
        """Returns the same of writes of a page each."""
        began = time.monotonic()
        transfers = [
            self.src.write(self.region, self.remote, [block], [block], timeout_s=_TIMEOUT_S)
            for block in self.blocks.tolist()
        ]
        for transfer in transfers:
            transfer.wait(_TIMEOUT_S)
        return _NUM_PAGES / (time.monotonic() - began)

    def close(self) -> None:
        self.src.close()
        self.dst.close()

    def _pause(self, waited_s: float, drive: bool) -> None:
        until = time.monotonic() + waited_s
        while (left := until - time.monotonic()) > 0:
            if drive:
                self.src.poll()
            else:
                time.sleep(left)


def measure(rounds: int) -> tuple[list[Delay], dict[str, float]]:
    """Returns delays to agents that sleep, spin or are polled, and rates of pages that go one by one."""
    found, rates = [], {}
    for who, spin_us, drive, waits in (
        ("asleep", 50, False, (0.001, 0.01, 0.1)),
        ("spinning", 20_000, False, (0.001,)),
        ("polled", 50, True, (0.001,)),
    ):
        writer = Writer(spin_us)
        for waited_s in waits:
            for what, verb in (("command", writer.command_us), ("write()", writer.write_us)):

                def once(
                    verb: Callable[[float, bool], float] = verb,
                    waited_s: float = waited_s,
                    drive: bool = drive,
                ) -> float:
                    return verb(waited_s, drive)

                found.append(
                    delays(f"{what}, {who}", waited_s, once, min(rounds, max(20, int(10 / waited_s))))
                )
        if who == "asleep":
            for what, rate in (("commands", writer.commands_per_s), ("writes", writer.writes_per_s)):
                rates[what] = float(np.median([rate() for _ in range(9)]))
        writer.close()
    return found, rates


def main() -> None:
    """Prints a line for each delay and rate; with ``--json`` one object."""
    parser = argparse.ArgumentParser(prog="python -m kvxfer.bench.latency.commands", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="of each delay")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, rates = measure(options.rounds)
    if options.json:
        result: dict[str, Any] = {"bench": "commands", "delays": [asdict(row) for row in rows]}
        print(json.dumps({**result, "per_s": rates}))
        return
    print_delays(rows)
    for name, rate in rates.items():
        print(f"{name} of a page of {_PAGE_NBYTES} bytes each: {rate:.0f} in a second")


if __name__ == "__main__":
    main()
