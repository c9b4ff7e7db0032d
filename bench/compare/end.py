"""One end of a baseline, in an environment of its own, where the other software and numpy are installed."""

from __future__ import annotations

import importlib
import mmap
import select
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.process import End
from kvxfer.bench.work.page_data import PageFiller, Words, block_order, page_keys

# A look at the channel costs a system call; a poll of the software costs less.
_POLLS = 64
# To fill and check a page each time would measure cold caches.
_CHECK_EVERY = 50
# The page that goes out, and the one that comes in.
_OUT, _IN = np.array([0], np.uint32), np.array([1], np.uint32)


class Software(Protocol):
    """What an adapter's ``create(options)`` returns. Bytes are host memory."""

    version: str
    #: As requested, and as the software reports it; printed beside the figures.
    settings: Message
    #: Whether transfers advance only inside calls, so that the passive end has to poll as well.
    must_poll: bool

    def register(self, address: int, nbytes: int) -> None: ...

    def contact(self) -> Message:
        """What the other end must know about this one, as JSON."""

    def connect(self, contact: Message) -> None: ...

    def prepare(self, page_nbytes: int, num_pages: int) -> None:
        """Prepares descriptors of all pages at both ends, if the software has such a step."""

    def move(self, op: str, local: Any, remote: Any, tag: str, timeout_s: float) -> int:
        """Moves pages (``int32`` indices) and waits; ``tag`` goes to the other end. Returns ns to post."""

    def notifications(self) -> list[str]:
        """Returns the tags that have arrived. Advances transfers that advance only inside calls."""


class BaselineEnd(End):
    """The commands of one end."""

    def __init__(self, fields: Message, coordinator: Channel, peers: list[Channel]) -> None:
        super().__init__(fields, coordinator, peers)
        self.options = fields
        self.page_nbytes: int = fields["page_nbytes"]
        self.num_pages: int = fields["num_pages"]
        # The pages are faulted in first, so that no measurement includes that.
        # Private and aligned, as kvxfer's foreign memory is.
        mapped = mmap.mmap(-1, self.page_nbytes * self.num_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = np.frombuffer(mapped, np.uint8)
        self.pages: Words = self.memory.view(np.uint64).reshape(self.num_pages, -1)
        self.filler = PageFiller(self.page_nbytes)
        self.order, self.far_order = (
            block_order(self.num_pages, fields[seed]) for seed in ("seed", "far_seed")
        )
        self.fill(0)
        # Memory beyond this belongs to the software.
        self.rss_before_mib, self.threads_before = _rss_mib(), _num_threads()
        times = [time.monotonic()]
        module = importlib.import_module(fields["adapter"])
        times.append(time.monotonic())
        self.software: Software = module.create(fields)
        times.append(time.monotonic())
        self.software.register(int(self.memory.ctypes.data), self.memory.nbytes)
        times.append(time.monotonic())
        steps = zip(("import_ms", "create_ms", "register_ms"), np.diff(times).tolist(), strict=True)
        self.took = {name: seconds * 1e3 for name, seconds in steps}

    def open(self) -> Message:
        return {
            "version": self.software.version,
            "settings": self.software.settings,
            "contact": {**self.software.contact(), "address": int(self.memory.ctypes.data)},
            **self.took,
        }

    def connect(self, contact: Message) -> Message:
        start_ns = time.monotonic_ns()
        self.software.connect(contact)
        self.software.prepare(self.page_nbytes, self.num_pages)
        return {"connect_ms": (time.monotonic_ns() - start_ns) / 1e6}

    def fill(self, iteration: int) -> None:
        self.filler.fill(self.pages, self.order, page_keys(iteration, num_pages=self.num_pages))

    def clear(self) -> None:
        self.memory[:] = 0

    def move(self, op: str, iteration: int) -> Message:
        cpu_ns, start_ns = time.process_time_ns(), time.monotonic_ns()
        post_ns = self._move(op, self.order, self.far_order, f"pages-{iteration}")
        total_ns = time.monotonic_ns() - start_ns
        return {"total_ns": total_ns, "post_ns": post_ns, "cpu_ns": time.process_time_ns() - cpu_ns}

    def serve(self) -> Message:
        """Acts as the passive end until the next command, ``served``. Replies to both commands."""
        cpu_ns = time.process_time_ns()
        self.coordinator.send("reply")
        for polls in range(1 << 62):
            if self.software.must_poll:
                self.software.notifications()
                if polls % _POLLS:
                    continue
            if select.select([self.coordinator], [], [], 0.0 if self.software.must_poll else None)[0]:
                break
        self.coordinator.receive(1.0)
        return {"cpu_ns": time.process_time_ns() - cpu_ns}

    def check(self, iteration: int) -> Message:
        """Compares every byte."""
        return {"wrong": self._wrong(self.order, page_keys(iteration, num_pages=self.num_pages))}

    def idle(self, seconds: float) -> Message:
        """Does nothing for a while. Returns what that cost, and what the process holds."""
        rss_mib = _rss_mib() - self.rss_before_mib
        cpu_ns, start_ns = time.process_time_ns(), time.monotonic_ns()
        time.sleep(seconds)
        elapsed_ns = time.monotonic_ns() - start_ns
        return {
            "idle_cpu_cores": (time.process_time_ns() - cpu_ns) / elapsed_ns,
            "rss_mib": rss_mib,
            "threads": _num_threads() - self.threads_before,
        }

    def ask(self, first: int, iterations: int) -> Message:
        """Writes the first page with a notification and waits for the answer, again and again.

        Wrong bytes are reported only at the end, because the other end waits for every write.
        """
        round_trips_ns: list[int] = []
        wrong = ""
        for iteration in range(first, first + iterations):
            self._fill_every(iteration, "ask")
            start_ns = time.perf_counter_ns()
            self._move("write", _OUT, _IN, f"ask-{iteration}")
            self._await_tag(f"answer-{iteration}")
            round_trips_ns.append(time.perf_counter_ns() - start_ns)
            wrong = wrong or self._check_every(iteration, "answer")
        return {"wrong": wrong, "round_trips_ns": round_trips_ns}

    def answer(self, first: int, iterations: int) -> Message:
        """Answers each write with a write of its own. Returns how long it took over each one."""
        self.coordinator.send("reply")
        held_ns: list[int] = []
        wrong = ""
        for iteration in range(first, first + iterations):
            self._await_tag(f"ask-{iteration}")
            seen_ns = time.perf_counter_ns()
            wrong = wrong or self._check_every(iteration, "ask")
            self._fill_every(iteration, "answer")
            held_ns.append(time.perf_counter_ns() - seen_ns)
            self._move("write", _OUT, _IN, f"answer-{iteration}")
        return {"wrong": wrong, "held_ns": held_ns}

    def _move(self, op: str, local: Any, remote: Any, tag: str) -> int:
        local, remote = local.astype(np.int32), remote.astype(np.int32)
        return self.software.move(op, local, remote, tag, self.options["timeout_s"])

    def _await_tag(self, tag: str) -> None:
        deadline = time.monotonic() + self.options["timeout_s"]
        while time.monotonic() < deadline:
            for _ in range(_POLLS):
                if tag in self.software.notifications():
                    return
        raise TimeoutError(f"no notification {tag!r} arrived within {self.options['timeout_s']:g} s")

    def _fill_every(self, iteration: int, way: str) -> None:
        if iteration % _CHECK_EVERY == 0:
            self.filler.fill(self.pages, _OUT, _way_keys(iteration, way))

    def _check_every(self, iteration: int, way: str) -> str:
        wrong = "" if iteration % _CHECK_EVERY else self._wrong(_IN, _way_keys(iteration, way))
        return f"{way} of iteration {iteration}: {wrong}" if wrong else ""

    def _wrong(self, rows: Any, keys: Words) -> str:
        return str(self.filler.check(self.pages, rows, keys) or "")


def _way_keys(iteration: int, way: str) -> Words:
    return page_keys(iteration, int(way == "answer"), num_pages=1)


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / (1 << 20)


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
