"""Engines for tests: ranks in separate processes, controlled through rank 0."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from tests.trtllm.executor import Options, main, prefix_hashes, sampled

#: The bound of every wait; the tests assert nothing about durations.
BOUND_S: Final = 60.0
# If several engines share two cores, a peer that is silent for seconds is not lost.
PATIENCE: Final[dict[str, Any]] = {
    "connect_timeout_s": 15.0,
    "silent_timeout_s": 20.0,
    "lookup_timeout_s": 10.0,
    "load_timeout_s": 40.0,
    "model": "tiny",
}

# Ranks are forks of a process that has imported their modules, but has made no objects.
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


@dataclass
class Answer:
    """The outcome of a request: ``"done"`` with its tokens, ``"cancelled"`` or ``"failed"``."""

    what: str
    tokens: list[int] = field(default_factory=list)
    num_matched: int = 0


class Engine:
    """One engine. Closed at the end of a ``with`` (`engine`)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.answers: dict[int, Answer] = {}
        self.preempted: set[int] = set()
        self.is_held = False
        self._other: list[tuple[Any, ...]] = []
        self._ended: list[tuple[Any, ...]] = []
        self._controls: list[Connection] = []
        self.processes = []
        lines = [_forks.Pipe() for _ in range(options.tp_size - 1)]
        for rank in range(options.tp_size):
            ours, theirs = _forks.Pipe()
            own = [near for near, _ in lines] if rank == 0 else [lines[rank - 1][1]]
            process = _forks.Process(target=main, args=(options, rank, own, theirs), daemon=True)
            process.start()
            theirs.close()
            self._controls.append(ours)
            self.processes.append(process)
        for pair in lines:
            for line in pair:
                line.close()

    def wait_started(self) -> Engine:
        """Waits until every rank has registered its cache; raises what a rank could not do."""
        for control in self._controls:
            told = control.recv() if control.poll(BOUND_S) else ("unstarted", "", "silent")
            if told[0] != "started":
                raise RuntimeError(f"rank {told[1]}: {told[2]}")
        return self

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits until the held load is promised; the load begins at the end of the ``with``."""
        self.until(lambda: self.is_held, "a load that is promised")
        self.is_held = False
        yield
        self.tell("go")

    # ---- requests -----------------------------------------------------------------------------

    def submit(
        self,
        request_id: int,
        tokens: list[int],
        max_new_tokens: int = 1,
        num_local: int = 0,
        salt: str | None = None,
    ) -> None:
        """Sends a request; `num_local` of its tokens are in the engine's own prefix cache."""
        self.tell("submit", request_id, tokens, max_new_tokens, num_local, salt)

    def cancel(self, request_id: int) -> None:
        self.tell("cancel", request_id)

    def tell(self, *command: Any) -> None:
        try:
            self._controls[0].send(command)
        except BrokenPipeError:
            self.until(lambda: False, str(command))  # it has reported the reason

    def answer(self, request_id: int) -> Answer:
        """Waits for the outcome of a request."""
        self.until(lambda: request_id in self.answers, f"an answer to request {request_id}")
        return self.answers[request_id]

    def ask(self, *command: Any) -> Any:
        """Returns rank 0's answer for all ranks."""
        self.tell(*command)
        self.until(lambda: any(each[0] == command[0] for each in self._other), str(command))
        found = next(each for each in self._other if each[0] == command[0])
        self._other.remove(found)
        return found[1]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Processes the ranks' messages until a condition holds."""
        deadline = time.monotonic() + BOUND_S
        while not condition():
            # A rank closes its connection after its last message.
            ended = {each[1] for each in self._ended}
            heard = [control for rank, control in enumerate(self._controls) if rank not in ended]
            ready = wait(heard, max(deadline - time.monotonic(), 0.0))
            assert ready, f"{what}: not within {BOUND_S:g} s"
            for control in ready:
                assert isinstance(control, Connection)
                try:
                    self._take(control.recv())
                except EOFError:
                    raise AssertionError(f"{what}: a rank has died") from None

    def _take(self, told: tuple[Any, ...]) -> None:
        match told:
            case ("done", request_id, tokens, num_matched):
                self.answers[request_id] = Answer("done", tokens, num_matched)
            case ("cancelled" | "failed" as what, request_id):
                self.answers[request_id] = Answer(what)
            case ("held",):
                self.is_held = True
            case ("preempted", request_id):
                self.preempted.add(request_id)
            case ("ended", rank, failures):
                self._ended.append(told)
                assert not failures, f"rank {rank}: {failures[0]}"
            case _:
                self._other.append(told)

    def wait_empty(self) -> None:
        """Waits until no rank holds anything of a request any more, stepping the engine as it asks."""
        deadline = time.monotonic() + BOUND_S
        while left := self.ask("left"):
            assert time.monotonic() < deadline, f"still there: {left}"

    def has_failed_loads(self) -> bool:
        """Whether a load has failed since the last call of `counts` or this."""
        return any(each for each in self.counts("failures"))

    def counts(self, name: str) -> Any:
        """Returns the sum of the ranks' counts since the last call."""
        return [None if each is None else each.get(name) for each in self.ask("counts")]

    # ---- processes ----------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Sends a signal to each of its ranks."""
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def close(self, leaves_open: bool = False) -> None:
        """Ends it without telling its connector, as the engine does; raises the error of a failed loop."""
        try:
            if all(process.is_alive() for process in self.processes):
                self.tell("end", leaves_open)
                self.until(lambda: len(self._ended) == len(self.processes), "the end")
                for process in self.processes:
                    process.join(BOUND_S)
                    assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends its processes."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        for control in self._controls:
            control.close()
        self._controls.clear()


@contextmanager
def engine(options: Options) -> Iterator[Engine]:
    """Yields an engine that has started; ends it."""
    made = Engine(options)
    try:
        yield made.wait_started()
    except BaseException:
        made.kill()
        raise
    made.close()


@contextmanager
def pair(
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    decode_tp_size: int = 0,
    **options: Any,
) -> Iterator[tuple[Engine, Engine]]:
    """Yields a prefill, and a decode that asks it. Both start at once; settings are added to `PATIENCE`."""
    tp_size = options.get("tp_size", 1)
    port = free_ports(tp_size + 1)
    first = Engine(Options({**PATIENCE, "role": "prefill", "port": port, **(prefill or {})}, **options))
    asked = {"role": "decode", "prefills": [f"tcp://127.0.0.1:{port}"]}
    if options.get("kind") == "layout":
        asked["failed_loads"] = "stop"
    own = {**options, "tp_size": decode_tp_size or tp_size}
    second = Engine(Options({**PATIENCE, **asked, **(decode or {})}, **own))
    try:
        yield first.wait_started(), second.wait_started()
    except BaseException:
        first.kill()
        second.kill()
        raise
    for each in (first, second):
        each.close()


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
