"""Many agents that exist only on the daemon's socket. They attach, and send records at a rate."""

from __future__ import annotations

import select
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.process import End
from kvxfer.daemon_link.frames import VERSION, FrameKind, frame, json_frame
from kvxfer.session.records import Record, encode

_TIMEOUT_S: Final = 60.0
# The interval at which agents report ended transfers (kvxfer/daemon_link/link.py).
_INTERVAL_S: Final = 0.05
#: One in so many records is of a failed transfer, which is a topic of its own.
FAILED_ONE_IN: Final = 100


class TellingEnd(End):
    """So many agents, each with one session to the next."""

    def __init__(self, fields: Message, coordinator: Channel, peers: Any = ()) -> None:
        super().__init__(fields, coordinator, peers)
        self._place = Path(fields["runtime"]) / "agents.sock"
        self._sockets = [self._attach(number) for number in range(fields["agents"])]
        self._num_sent = 0
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def tell(self, rate: float, count: int) -> None:
        """Begins to send so many records, at so many a second."""
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(rate, count))
        self._thread.start()

    def told(self) -> Message:
        """Waits until all records are sent. Returns how many there are in all."""
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise BenchError(f"records could not be sent: {self._error}")
        return {"records": self._num_sent}

    async def aclose(self) -> None:
        """Ends the connections."""
        for each in self._sockets:
            each.close()

    # ---- inside ------------------------------------------------------------------------------------

    def _attach(self, number: int) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(_TIMEOUT_S)
        connected.connect(str(self._place))
        hello = {
            "t": "hello",
            "v": VERSION,
            "name": f"agent-{number}",
            "incarnation": f"{number:032x}",
            "address": "tcp://127.0.0.1:1",
            "host": "here",
            "version": "0",
            "may": ["show"],
            "options": {},
        }
        peer = {
            "session": 1,
            "name": "peer",
            "incarnation": f"{number ^ 1:032x}",
            "address": "tcp://127.0.0.1:1",
            "is_ours": True,
            "rails": ["shm"],
            "paths": [],
            "notes": [],
            "regions": ["kv"],
            "region_ids": [1],
            "num_regions": 1,
        }
        clocks = {"unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        state = {"t": "state", "peers": [peer], "num_peers": 1, **clocks}
        connected.sendall(json_frame(hello) + json_frame(state))
        if not select.select([connected], [], [], _TIMEOUT_S)[0] or b"welcome" not in connected.recv(4096):
            raise BenchError(f"the daemon did not accept agent {number}")
        return connected

    def _run(self, rate: float, count: int) -> None:
        try:
            due = time.perf_counter()
            left = count
            while left:
                some = min(left, round(rate * _INTERVAL_S))
                self._tell(some)
                left -= some
                due += some / rate
                if (wait_s := due - time.perf_counter()) > 0:
                    time.sleep(wait_s)
        except Exception as error:
            self._error = error

    def _tell(self, count: int) -> None:
        """Sends records, equally many from each agent."""
        told: list[list[Record]] = [[] for _ in self._sockets]
        for number in range(self._num_sent, self._num_sent + count):
            told[number % len(told)].append(_record(number))
        self._num_sent += count
        for connected, records in zip(self._sockets, told, strict=True):
            if records:
                connected.sendall(frame(FrameKind.RECORDS, encode(records)))


def _record(number: int) -> Record:
    now_ns = time.monotonic_ns()
    has_failed = number % FAILED_ONE_IN == 0
    return Record(
        session=1,
        transfer=number,
        handle=0,
        ours=True,
        role="source",
        region=1,
        remote_region=1,
        outcome="failed" if has_failed else "done",
        code="peer-lost" if has_failed else "",
        state="failed" if has_failed else "done",
        priority=0,
        num_blocks=16,
        num_layers=32,
        num_pieces=32,
        pieces_done=32,
        nbytes=1 << 20,
        posted_ns=now_ns - 3_000_000,
        begun_ns=now_ns - 2_000_000,
        first_piece_ns=now_ns - 1_000_000,
        ended_ns=now_ns,
        rails=("shm",),
        context=f"request-{number}",
        message="",
    )
