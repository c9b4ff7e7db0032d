"""Entry of a worker process: ``python -m kvxfer.bench.run.worker JSON``.

``end`` names the class that it serves, ``fields`` are its options, ``channels`` the numbers of inherited
sockets: to the coordinator, then to other workers.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import socket
import sys

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.channel import Channel
from kvxfer.bench.run.process import End, serve


def main() -> None:
    """Serves to the end; exits with 1 where something failed, of which the coordinator is told."""
    # Ctrl-C goes to the whole group; the coordinator ends its workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = json.loads(sys.argv[1])
    coordinator, *peers = (
        Channel(socket.socket(fileno=number), "peer" if place else "coordinator")
        for place, number in enumerate(told["channels"])
    )
    try:
        asyncio.run(_serve(told["end"], told["fields"], coordinator, peers))
    except Exception as error:
        first: BaseException = error
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        try:
            coordinator.send_error(first)
        except BenchError:
            pass  # it is gone, and with it the one who asked
        sys.exit(1)


async def _serve(named: str, fields: dict[str, object], coordinator: Channel, peers: list[Channel]) -> None:
    module, _, name = named.partition(":")
    end: End = getattr(importlib.import_module(f"kvxfer.bench.{module}"), name)(fields, coordinator, peers)
    try:
        await serve(end)
    finally:
        await end.aclose()


if __name__ == "__main__":
    main()
