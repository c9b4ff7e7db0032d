"""What both kinds of ``kvxfer bench pages`` have in common: where pages may lie, and one move of them."""

from __future__ import annotations

from typing import Any

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.option_checks import check_known
from kvxfer.bench.run.process import Worker, check_timeout

TRANSPORTS = ("shm", "unix", "tcp")
OPERATIONS = ("write", "read")
PATTERNS = ("random", "runs", "contiguous")
MEMORY_KINDS = ("pool", "foreign")

#: Iterations that are not measured: page faults of the peer's mapping, compiled programs, TCP's window.
WARMUP_ITERATIONS = 1


def check_moves(options: Any) -> None:
    """Raises `BenchError` for options of a move that nobody knows, or that do not go together."""
    check_known(options, transport=TRANSPORTS, op=OPERATIONS, pattern=PATTERNS, memory=MEMORY_KINDS)
    check_timeout(options.timeout_s)
    if options.transport == "unix" and options.memory == "pool":
        raise BenchError("--transport unix carries what shm cannot reach: use it with --memory foreign")


def connect(op: str, source: Worker, destination: Worker) -> None:
    """Connects two workers whose agents are open; who posts is who calls."""
    active, passive = (source, destination) if op == "write" else (destination, source)
    active.call("connect", address=passive.call("address")["address"])
    passive.call("accept")


def move(
    op: str, source: Worker, destination: Worker, write: Message, read: Message
) -> tuple[Message, Message]:
    """Moves pages once and returns what the end that posted and the other one say.

    Parameters
    ----------
    write
        What both workers are told of a write.
    read
        What the destination is told of a read.
    """
    if op == "write":
        destination.channel.send("expect", **write)
        destination.reply()  # it waits now, and replies again at the end
        active = source.call("write", **write)
        return active, destination.reply()
    source.call("serve_begin")
    active = destination.call("read", **read)
    return active, source.call("serve_end")


def judged(options: Any, iteration: int, active: Message, passive: Message, checked: Message) -> Message:
    """Returns the figures of a move that brought the right bytes by the right way.

    Raises
    ------
    CheckFailedError
        It did not.
    """
    if checked["wrong"]:
        raise CheckFailedError(
            f"iteration {iteration} of {options.op} over {options.transport}: {checked['wrong']}"
        )
    # The destination moves the bytes, so it is the one that knows how they came.
    rails = (passive if options.op == "write" else active)["rails"]
    if set(rails) != {options.transport}:
        raise CheckFailedError(
            f"asked for {options.transport}, but the bytes went over {', '.join(rails) or 'no rail'}"
        )
    return {**active, "rails": rails, "cpu_ns": active["cpu_ns"] + passive["cpu_ns"]}
