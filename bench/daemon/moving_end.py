"""Two agents in a process of their own that move pages at a rate, with or without a daemon."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import kvxfer
from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.channel import Channel, Message
from kvxfer.bench.run.endpoint import LEASE_S
from kvxfer.bench.run.process import End
from kvxfer.daemon_link.link import LINK_THREAD
from kvxfer.testing.pair import connected_pair

_TIMEOUT_S: Final = 60.0
# Transfers begin in groups at this interval. With a thousand a second, a sleep for each would cost more.
_INTERVAL_S: Final = 0.005


class MovingEnd(End):
    """Agents ``prefill`` and ``decode``; the first writes to the second, a block at a time."""

    def __init__(self, fields: Message, coordinator: Channel, peers: Any = ()) -> None:
        super().__init__(fields, coordinator, peers)
        options = kvxfer.AgentOptions(daemon=fields["runtime"], daemon_may=("show", "drain", "move", "grant"))
        self._stack = ExitStack()
        self._pair = self._stack.enter_context(connected_pair(options))
        decode = self._pair.decode
        decode.region.grant(decode.peer, mode="write", ttl_s=LEASE_S).wait(_TIMEOUT_S)
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._error: Exception | None = None
        self._num_done = 0
        self._begun = 0.0, 0.0, 0.0

    def begin(self, rate: float) -> None:
        """Begins to move so many blocks a second, each by its own transfer; 0: as fast as possible."""
        self._stopped.clear()
        self._num_done = 0
        self._begun = _clocks()
        self._thread = threading.Thread(target=self._move, args=(rate,))
        self._thread.start()

    def end(self) -> Message:
        """Stops moving. Returns how many blocks were moved, and what that took."""
        assert self._thread is not None
        self._stopped.set()
        self._thread.join()
        if self._error is not None:
            raise BenchError(f"a transfer failed: {self._error}")
        wall_s, cpu_s, link_s = (now - begun for now, begun in zip(_clocks(), self._begun, strict=True))
        return {"transfers": self._num_done, "elapsed_s": wall_s, "cpu_s": cpu_s, "link_cpu_s": link_s}

    def _move(self, rate: float) -> None:
        each = max(1, round(rate * _INTERVAL_S))
        interval_s = each / rate if rate else 0.0
        due = time.perf_counter()
        try:
            while not self._stopped.is_set():
                self._move_some(each)
                due = max(due + interval_s, time.perf_counter() - 1.0)
                if (left_s := due - time.perf_counter()) > 0:
                    time.sleep(left_s)
        except Exception as error:
            self._error = error

    def _move_some(self, count: int) -> None:
        source = self._pair.prefill
        going = []
        for number in range(self._num_done, self._num_done + count):
            block = number % source.num_blocks
            context = f"request-{number}"
            going.append(source.agent.write(source.region, source.remote, [block], [block], context=context))
        for transfer in going:
            transfer.wait(_TIMEOUT_S)
        self._num_done += count

    async def aclose(self) -> None:
        """Ends the agents."""
        self._stopped.set()
        self._stack.close()


def _clocks() -> tuple[float, float, float]:
    """Returns seconds of wall time, of all threads, and of the threads that talk to the daemon."""
    links = [thread.native_id for thread in threading.enumerate() if thread.name == LINK_THREAD]
    link_ns = sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in links)
    return time.perf_counter(), time.process_time(), link_ns / 1e9
