"""Entry of a worker process: ``python -m kvxfer.bench.run.worker ROLE OPTIONS CHANNEL [PEER ...]``.

``OPTIONS`` is JSON; ``CHANNEL`` and ``PEER`` are the numbers of inherited sockets, to the
coordinator and to the other workers.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Awaitable, Callable

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.channel import Channel, Message

Role = Callable[[Message, Channel, list[Channel]], Awaitable[None]]


def _role(name: str) -> Role:
    # A worker imports its own role alone.
    if name in ("source", "destination"):
        from kvxfer.bench.pages import worker as pages_worker

        run = pages_worker.run_source if name == "source" else pages_worker.run_destination
        return lambda options, coordinator, _: run(options, coordinator, None)
    if name in ("layout-source", "layout-destination"):
        from kvxfer.bench.pages import layouts_worker as layout_worker

        return lambda options, coordinator, _: layout_worker.run(options, coordinator, name)
    if name in ("near", "far"):
        from kvxfer.bench.latency import worker as latency_worker

        return lambda options, coordinator, _: latency_worker.run(options, coordinator, name)
    if name in ("hub", "crowd"):
        from kvxfer.bench.scale import worker as scale_worker

        return lambda options, coordinator, _: scale_worker.run(options, coordinator, name)
    if name == "prefill":
        from kvxfer.bench.handover import prefill

        return prefill.run
    if name == "decode":
        from kvxfer.bench.handover import decode

        return decode.run
    raise BenchError(f"no such role: {name!r}")


def main(arguments: list[str]) -> int:
    """Runs one role to its end; returns the exit status."""
    # Ctrl-C goes to the whole group; the coordinator ends its workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, options, *descriptors = arguments
    streams = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    coordinator = Channel(streams[0], "coordinator")
    peers = [Channel(stream, "peer") for stream in streams[1:]]
    try:
        asyncio.run(_run(_role(name), json.loads(options), coordinator, peers))
    except Exception as error:
        try:
            coordinator.send_error(_first(error))
        except BenchError:
            pass  # it is gone, and with it the one who asked
        return 1
    return 0


def _first(error: Exception) -> Exception:
    """Returns what went wrong first in a group of tasks."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(role: Role, options: Message, coordinator: Channel, peers: list[Channel]) -> None:
    await role(options, coordinator, peers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
