"""One end of a baseline: ``python worker.py ADAPTER OPTIONS CHANNEL``.

Runs in an environment of its own, where the other software and numpy are installed and kvxfer need
not be, so nothing of kvxfer is imported. ``ADAPTER`` is a module beside this one; ``OPTIONS`` is
JSON; ``CHANNEL`` is the number of an inherited socket, to the coordinator. A command is one JSON
object on one line with its name as ``kind``; so is its answer, of kind ``reply`` or ``error``. The
end of the channel ends this process.
"""

from __future__ import annotations

import importlib
import json
import mmap
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from page_data import PageData, page_order  # type: ignore[import-not-found]  # lies beside this file

Message = dict[str, Any]

# A look at the channel costs a system call; a poll of the software costs less.
_POLLS = 64
# Filling and checking a page each time would measure cold caches.
_CHECK_EVERY = 50
# The page that goes out, and the one that comes in.
_OUT, _IN = np.array([0], np.int32), np.array([1], np.int32)


class Software(Protocol):
    """What an adapter's ``create(options)`` returns. Bytes are host memory."""

    version: str
    #: As it was asked for and as it says itself: printed beside the figures.
    settings: Message
    #: Whether transfers advance only inside calls, so that the passive end has to poll as well.
    must_poll: bool

    def register(self, address: int, nbytes: int) -> None: ...

    def contact(self) -> Message:
        """What the other end has to know of this one, as JSON."""

    def connect(self, contact: Message) -> None: ...

    def prepare(self, page_nbytes: int, num_pages: int) -> None:
        """Prepares descriptors of all pages at both ends, where the software has such a step."""

    def move(self, op: str, local: Any, remote: Any, tag: str, timeout_s: float) -> int:
        """Moves pages (``int32`` indices) and waits; ``tag`` goes to the other end. Returns ns to post."""

    def notifications(self) -> list[str]:
        """Returns the tags that have arrived, and advances what advances only inside calls."""


class End:
    """The commands of one end; a handler takes the command's fields and returns the reply's."""

    def __init__(self, adapter: str, options: Message, channel: socket.socket) -> None:
        self.options = options
        self.channel = channel
        self.lines = channel.makefile("rb")
        self.page_nbytes: int = options["page_nbytes"]
        self.num_pages: int = options["num_pages"]
        # Pages that are there: the first pass over them is not what is measured.
        self.memory = np.frombuffer(mmap.mmap(-1, self.page_nbytes * self.num_pages), np.uint8)
        self.data = PageData(self.memory, self.page_nbytes)
        self.order = page_order(options["pattern"], self.num_pages, options["seed"])
        self.far_order = page_order(options["pattern"], self.num_pages, options["far_seed"])
        self.data.fill(self.order, 0)
        # What comes on top of this is the software's.
        self.rss_before_mib, self.threads_before = _rss_mib(), _num_threads()
        start_ns = time.monotonic_ns()
        module = importlib.import_module(adapter)
        self.import_ns = time.monotonic_ns() - start_ns
        start_ns = time.monotonic_ns()
        self.software: Software = module.create(options)
        self.create_ns = time.monotonic_ns() - start_ns
        start_ns = time.monotonic_ns()
        self.software.register(int(self.memory.ctypes.data), self.memory.nbytes)
        self.register_ns = time.monotonic_ns() - start_ns

    def open(self) -> Message:
        return {
            "version": self.software.version,
            "settings": self.software.settings,
            "contact": {**self.software.contact(), "address": int(self.memory.ctypes.data)},
            "import_ms": self.import_ns / 1e6,
            "create_ms": self.create_ns / 1e6,
            "register_ms": self.register_ns / 1e6,
        }

    def connect(self, contact: Message) -> Message:
        start_ns = time.monotonic_ns()
        self.software.connect(contact)
        self.software.prepare(self.page_nbytes, self.num_pages)
        return {"connect_ms": (time.monotonic_ns() - start_ns) / 1e6}

    def fill(self, iteration: int) -> Message:
        self.data.fill(self.order, iteration)
        return {}

    def clear(self) -> Message:
        self.memory[:] = 0
        return {}

    def move(self, op: str, iteration: int) -> Message:
        cpu_ns, start_ns = time.process_time_ns(), time.monotonic_ns()
        tag = f"pages-{iteration}"
        post_ns = self.software.move(op, self.order, self.far_order, tag, self.options["timeout_s"])
        total_ns = time.monotonic_ns() - start_ns
        return {"total_ns": total_ns, "post_ns": post_ns, "cpu_ns": time.process_time_ns() - cpu_ns}

    def serve(self) -> Message:
        """Is the passive end from here until the next command, which is ``served``."""
        cpu_ns = time.process_time_ns()
        _send(self.channel, "reply")
        polls = 0
        while True:
            wait_s = 0.0 if self.software.must_poll else None
            if self.software.must_poll:
                self.software.notifications()
                polls += 1
                if polls % _POLLS:
                    continue
            if select.select([self.channel], [], [], wait_s)[0]:
                break
        self.lines.readline()
        return {"cpu_ns": time.process_time_ns() - cpu_ns}

    def check(self, iteration: int) -> Message:
        """Compares every byte; ``corrupt`` among the options flips one before."""
        if self.options["corrupt"]:
            self.memory[-1] ^= 1
        return {"wrong": self.data.check(self.order, iteration)}

    def idle(self, seconds: float) -> Message:
        """Does nothing for a while, and says what that cost and what is there."""
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
        """Writes the first page with a notification, waits for the answer, and again.

        Wrong bytes are told at the end: the other end waits for every write.
        """
        round_trips_ns: list[int] = []
        wrong = ""
        for iteration in range(first, first + iterations):
            self._fill_every(iteration, "ask")
            start_ns = time.perf_counter_ns()
            self.software.move("write", _OUT, _IN, f"ask-{iteration}", self.options["timeout_s"])
            self._await_tag(f"answer-{iteration}")
            round_trips_ns.append(time.perf_counter_ns() - start_ns)
            wrong = wrong or self._check_every(iteration, "answer")
        return {"wrong": wrong, "round_trips_ns": round_trips_ns}

    def answer(self, first: int, iterations: int) -> Message:
        """Waits for a write and answers with one; says how long it held each in hand."""
        _send(self.channel, "reply")
        held_ns: list[int] = []
        wrong = ""
        for iteration in range(first, first + iterations):
            self._await_tag(f"ask-{iteration}")
            seen_ns = time.perf_counter_ns()
            wrong = wrong or self._check_every(iteration, "ask")
            self._fill_every(iteration, "answer")
            held_ns.append(time.perf_counter_ns() - seen_ns)
            self.software.move("write", _OUT, _IN, f"answer-{iteration}", self.options["timeout_s"])
        return {"wrong": wrong, "held_ns": held_ns}

    def _await_tag(self, tag: str) -> None:
        deadline = time.monotonic() + self.options["timeout_s"]
        while time.monotonic() < deadline:
            for _ in range(_POLLS):
                if tag in self.software.notifications():
                    return
        raise TimeoutError(f"no notification {tag!r} within {self.options['timeout_s']:g} s")

    def _fill_every(self, iteration: int, way: str) -> None:
        if iteration % _CHECK_EVERY == 0:
            self.data.fill(_OUT, _coordinate(iteration, way))

    def _check_every(self, iteration: int, way: str) -> str:
        if iteration % _CHECK_EVERY:
            return ""
        if self.options["corrupt"]:
            self.memory[-1] ^= 1
        wrong = self.data.check(_IN, _coordinate(iteration, way))
        return f"{way} of iteration {iteration}: {wrong}" if wrong else ""


_COMMANDS = ("open", "connect", "fill", "clear", "move", "serve", "check", "idle", "ask", "answer")


def _coordinate(iteration: int, way: str) -> int:
    return 2 * iteration + (way == "answer")


def _send(channel: socket.socket, kind: str, **fields: Any) -> None:
    channel.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / (1 << 20)


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def main(arguments: list[str]) -> int:
    """Serves commands until the coordinator is gone; returns the exit status."""
    # Ctrl-C goes to the whole group; the coordinator ends its workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adapter, options, descriptor = arguments
    channel = socket.socket(fileno=int(descriptor))
    try:
        end = End(adapter, json.loads(options), channel)
        while line := end.lines.readline():
            command = json.loads(line)
            kind = command.pop("kind")
            if kind not in _COMMANDS:
                raise ValueError(f"no such command: {kind!r}")
            _send(channel, "reply", **getattr(end, kind)(**command))
    except Exception as error:
        try:
            _send(channel, "error", message=f"{type(error).__name__}: {error}", check_failed=False)
        except OSError:
            pass  # it is gone, and with it the one who asked
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
