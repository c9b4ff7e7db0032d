"""Engines for tests: one that the test drives in this process, and one that runs in another."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from tests.trtllm.cache import Options, prefix_hashes, sampled
from tests.trtllm.replay import BOUND_S, Answer, Engine, Waits, installed
from tests.waiting import until

# If several engines share two cores, a peer that is silent for seconds is not lost.
PATIENCE: Final[dict[str, Any]] = {
    "connect_timeout_s": 15.0,
    "silent_timeout_s": 20.0,
    "lookup_timeout_s": 10.0,
    "load_timeout_s": 40.0,
    "model": "tiny",
}

# Engines are forks of a process that has imported their modules, but has made no objects.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.trtllm.preloaded"])
_ports = itertools.count()


def free_ports(count: int) -> int:
    """Returns the first of several consecutive free ports."""
    random_ = random.Random(os.getpid() * 1000 + next(_ports))
    while True:
        first = random_.randrange(20_000, 32_000 - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


class Remote(Waits):
    """An engine in its own process, which goes on by itself."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._control, theirs = _forks.Pipe()
        self.process = _forks.Process(target=_serve, args=(options, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def wait_started(self) -> Remote:
        """Waits until every rank has registered its cache."""
        assert self._hear() == "started"
        return self

    def turn(self) -> None:
        time.sleep(0.002)

    def ask(self, name: str, *args: Any) -> Any:
        self._control.send((name, *args))
        return self._hear()

    def _hear(self) -> Any:
        assert self._control.poll(BOUND_S), "the engine is silent"
        try:
            return self._control.recv()
        except EOFError:
            raise AssertionError("the engine has died") from None

    def signal(self, number: int) -> None:
        """Sends a signal; after SIGSTOP no thread runs any more when this returns."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            tasks = Path(f"/proc/{self.process.pid}/task")
            until(lambda: all(has_stopped(task / "stat") for task in tasks.iterdir()), "a thread still runs")

    def close(self, leaves_open: bool = False) -> None:
        """Ends it; with `leaves_open` without telling its connector, as the engine does."""
        if self.process.is_alive():
            self._control.send(("end", leaves_open))
            self.process.join(BOUND_S)
            assert self.process.exitcode == 0, f"the engine ended with {self.process.exitcode}"
        self._control.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def has_stopped(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False  # the thread has ended just now


def _serve(options: Options, control: Connection) -> None:
    with installed(options.release):
        made = Engine(options)
        control.send("started")
        while True:
            if control.poll(0 if made.is_busy else 0.002):
                name, *args = control.recv()
                if name == "end":
                    break
                control.send(made.ask(name, *args))
            made.iterate()
        if not args[0]:
            made.close()


@contextmanager
def pair(
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    decode_tp_size: int = 0,
    **options: Any,
) -> Iterator[tuple[Remote, Engine]]:
    """Yields a prefill in another process, and a decode that asks it; settings are added to `PATIENCE`."""
    tp_size = options.get("tp_size", 1)
    port = free_ports(tp_size + 1)
    first = Remote(Options({**PATIENCE, "role": "prefill", "port": port, **(prefill or {})}, **options))
    asks = {"role": "decode", "prefills": [f"tcp://127.0.0.1:{port}"]}
    if options.get("kind") == "layout":
        asks["failed_loads"] = "stop"
    own = {**options, "tp_size": decode_tp_size or tp_size}
    try:
        with local(Options({**PATIENCE, **asks, **(decode or {})}, **own)) as second:
            yield first.wait_started(), second
        first.close()
    finally:
        first.kill()


@contextmanager
def local(options: Options) -> Iterator[Engine]:
    """Yields an engine in this process."""
    with installed(options.release):
        made = Engine(options)
        try:
            yield made
        finally:
            made.close()


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Draws a prompt."""
    random_ = random.Random(seed)
    return [random_.randrange(50_000) for _ in range(num_tokens)]


def expected(tokens: list[int], count: int, salt: str | None = None) -> list[int]:
    """Returns the tokens that one engine alone samples after a prompt."""
    whole = list(tokens)
    for _ in range(count):
        whole.append(sampled(prefix_hashes(whole, salt)))
    return whole[len(tokens) :]


def require(
    answer: Answer, prompt: list[int], num_new: int, num_matched: int, salt: str | None = None
) -> None:
    """Checks an answer's tokens, and how many tokens of the prompt another engine had."""
    assert (answer.tokens, answer.num_matched) == (expected(prompt, num_new, salt), num_matched)
