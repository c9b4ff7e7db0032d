"""Dials the hosts that requests name, in threads beside the engine.

A host that does not answer occupies a thread until connecting times out. Any client may name such hosts in a
request. So each request and each host may use a share of the threads, and hosts that have never answered may
not use all of them together. Requests take turns. Thus no host and no request delays the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import kvxfer
from kvxfer.connectors.common.handover import MAX_RANKS, place_of
from kvxfer.connectors.common.helper_threads import HelperThreads
from kvxfer.directory import Entry

_log = logging.getLogger("kvxfer")

_NUM_THREADS: Final = MAX_RANKS
# 16 of 64: an honest engine's ranks answer within milliseconds, so 64 ranks need four rounds.
_MOST_OF_REQUEST: Final = 16
# One rank for each of a host's 8 GPUs. A host gets twice as many threads, so that two requests can share it.
_MOST_OF_REQUEST_AT_HOST: Final = 8
_MOST_OF_HOST: Final = 16
# The other 16 are reserved for hosts that have answered before.
_MOST_OF_STRANGERS: Final = 48
_MAX_KNOWN_HOSTS: Final = 1024
# Dials that wait for a thread: those of 256 requests of 64 ranks each.
_MAX_WAITING: Final = 16384


@dataclass(slots=True)
class _Dial:
    """One agent to connect to."""

    rank: Entry
    host: str
    request_id: str
    asked_at: float
    future: Future[kvxfer.Peer]


class Diallers:
    """Connects to agents in a bounded number of threads.

    Parameters
    ----------
    connect
        Returns a session with an agent, or raises; it ends within `timeout_s`.
    timeout_s
        How long a caller waits for a session.
    """

    def __init__(self, connect: Callable[[Entry], kvxfer.Peer], timeout_s: float) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._threads = HelperThreads(_NUM_THREADS, thread_name_prefix="kvxfer-dial")
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Dial]] = {}  # by request, in the order of their turns
        self._num_waiting = 0
        # Running dials: by request, by host, by request and host; and those to hosts that never answered.
        self._of_request: Counter[str] = Counter()
        self._of_host: Counter[str] = Counter()
        self._at_host: Counter[tuple[str, str]] = Counter()
        self._num_strangers = 0
        self._known_hosts: dict[str, None] = {}  # hosts that have answered, the newest last; bounded
        self._is_closed = False

    def dial(self, rank: Entry, request_id: str) -> Future[kvxfer.Peer]:
        """Returns a future for a session with a rank."""
        future: Future[kvxfer.Peer] = Future()
        dial = _Dial(rank, place_of(rank).host.lower(), request_id, time.monotonic(), future)
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            # No waiting dial can begin now: each was tried when the last running dial ended.
            if request_id not in self._waiting and self._may_begin(dial):
                self._begin(dial)
                return future
            if self._num_waiting < _MAX_WAITING:
                self._num_waiting += 1
                self._waiting.setdefault(request_id, deque()).append(dial)
                return future
        self._give_up(dial, "too many other dials wait")
        return future

    def close(self) -> None:
        """Stops dialling; waiting futures end."""
        with self._lock:
            self._is_closed = True
            waiting = [dial for each in self._waiting.values() for dial in each]
            self._waiting.clear()
            self._num_waiting = 0
        for dial in waiting:
            dial.future.cancel()
        self._threads.shutdown(wait=False)

    # ---- inside -------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begins the dials that may begin, one of each request in turn; ends those that waited too long."""
        late: list[_Dial] = []
        with self._lock:
            before = time.monotonic() - self._timeout_s
            has_begun = True
            while has_begun:
                has_begun = False
                for request_id in list(self._waiting):
                    dials = self._waiting.pop(request_id)
                    while dials and dials[0].asked_at < before:
                        late.append(dials.popleft())
                    if dials and self._may_begin(dials[0]):
                        self._begin(dials.popleft())
                        has_begun = True
                    if dials:
                        self._waiting[request_id] = dials
            self._num_waiting = sum(map(len, self._waiting.values()))
        for dial in late:
            # The first caller has given up by now; later callers of the same future have not.
            self._give_up(
                dial,
                f"for {self._timeout_s:g} s too many other dials of its request, to its host or to hosts "
                "that have never answered were running",
            )

    def _give_up(self, dial: _Dial, why: str) -> None:
        if dial.future.set_running_or_notify_cancel():
            dial.future.set_exception(
                kvxfer.PeerError(
                    f"{dial.rank.address} was not dialled: {why}", code="unreachable", peer=dial.rank.name
                )
            )

    def _may_begin(self, dial: _Dial) -> bool:
        return (
            self._of_request.total() < _NUM_THREADS
            and self._of_request[dial.request_id] < _MOST_OF_REQUEST
            and self._of_host[dial.host] < _MOST_OF_HOST
            and self._at_host[dial.request_id, dial.host] < _MOST_OF_REQUEST_AT_HOST
            and (dial.host in self._known_hosts or self._num_strangers < _MOST_OF_STRANGERS)
        )

    def _begin(self, dial: _Dial) -> None:
        is_stranger = dial.host not in self._known_hosts
        self._count(dial, 1)
        self._num_strangers += is_stranger
        try:
            self._threads.submit(self._run, dial, is_stranger)
        except RuntimeError as error:
            # The system refuses a thread. The dial stays queued for one of the others, and its caller gives
            # up after `timeout_s` as for a host that does not answer.
            _log.warning("kvxfer: dialling %s is delayed: %s", dial.rank.address, error)

    def _count(self, dial: _Dial, change: int) -> None:
        counters: tuple[tuple[Counter[Any], Any], ...] = (
            (self._of_request, dial.request_id),
            (self._of_host, dial.host),
            (self._at_host, (dial.request_id, dial.host)),
        )
        for counter, key in counters:
            counter[key] += change
            if not counter[key]:
                del counter[key]

    def _run(self, dial: _Dial, is_stranger: bool) -> None:
        peer: kvxfer.Peer | None = None
        error: BaseException | None = None
        try:
            if dial.future.set_running_or_notify_cancel():
                peer = self._connect(dial.rank)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._count(dial, -1)
            self._num_strangers -= is_stranger
            if peer is not None:
                self._known_hosts.pop(dial.host, None)
                self._known_hosts[dial.host] = None
                if len(self._known_hosts) > _MAX_KNOWN_HOSTS:
                    del self._known_hosts[next(iter(self._known_hosts))]
        if peer is not None:
            dial.future.set_result(peer)
        elif error is not None:
            dial.future.set_exception(error)
        self._go_on()
