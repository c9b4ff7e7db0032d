"""Hosts that requests name, dialled beside the engine: none of them, and no request, keeps others waiting.

A host that does not answer holds a thread for as long as connecting may take. Whoever may send a request
may name such hosts, so each request and each host has a part of the threads, and hosts that have never
answered have not all of them together. Requests have their turns one after the other.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import kvxfer
from kvxfer.connectors.common.handover import MAX_RANKS, place_of
from kvxfer.directory import Entry

_NUM_THREADS: Final = MAX_RANKS
# 16 of 64: ranks of an honest engine answer within milliseconds, so its 64 are there in four rounds.
_MOST_OF_REQUEST: Final = 16
# A rank for each GPU of a host; twice, so that one request has not all that others may want of it.
_MOST_OF_REQUEST_AT_HOST: Final = 8
_MOST_OF_HOST: Final = 16
# The others are left to hosts that have answered before, whatever is named beside them.
_MOST_OF_STRANGERS: Final = 48
_MAX_KNOWN_HOSTS: Final = 1024


@dataclass(slots=True)
class _Dial:
    """One agent that is to be connected to."""

    rank: Entry
    host: str
    request_id: str
    asked_at: float
    future: Future[kvxfer.Peer]


class Diallers:
    """Connects to agents, as many at a time as there are threads.

    Parameters
    ----------
    connect
        Returns a session with an agent, or raises; it ends within `timeout_s`.
    timeout_s
        How long who asks waits.
    """

    def __init__(self, connect: Callable[[Entry], kvxfer.Peer], timeout_s: float) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvxfer-dial")
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Dial]] = {}  # by request, in the order of their turns
        # Under way: of a request, of a host, of a request at a host; and of hosts that have never answered.
        self._of_request: Counter[str] = Counter()
        self._of_host: Counter[str] = Counter()
        self._at_host: Counter[tuple[str, str]] = Counter()
        self._num_strangers = 0
        self._known_hosts: dict[str, None] = {}  # that have answered, the last of them
        self._is_closed = False

    def dial(self, rank: Entry, request_id: str) -> Future[kvxfer.Peer]:
        """Returns a session that is to be."""
        future: Future[kvxfer.Peer] = Future()
        dial = _Dial(rank, place_of(rank).host.lower(), request_id, time.monotonic(), future)
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            # None of those that wait may begin: each was tried when something ended.
            if request_id not in self._waiting and self._may_begin(dial):
                self._begin(dial)
            else:
                self._waiting.setdefault(request_id, deque()).append(dial)
        return future

    def close(self) -> None:
        """Stops; who waits is told so."""
        with self._lock:
            self._is_closed = True
            waiting = [dial for each in self._waiting.values() for dial in each]
            self._waiting.clear()
        for dial in waiting:
            dial.future.cancel()
        self._threads.shutdown(wait=False)

    # ---- inside -------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begins what may begin now, one of each request in turn, and ends what has waited for too long."""
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
        for dial in late:
            if dial.future.set_running_or_notify_cancel():
                # Who asked has given up; others behind it have not.
                dial.future.set_exception(
                    kvxfer.PeerError(
                        f"{dial.rank.address} was not dialled within {self._timeout_s:g} s: too many others "
                        "of its request, of its host or of hosts that have never answered were",
                        code="unreachable",
                        peer=dial.rank.name,
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
        self._threads.submit(self._run, dial, is_stranger)

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
