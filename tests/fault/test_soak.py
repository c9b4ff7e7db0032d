"""Minutes of random events by a seed: moves, cancels, revokes, kills, stops, ends and restarts.

``KVXFER_SOAK_S`` says for how long. One agent here has a peer in each of several processes, and a thread for
each peer. Bytes are compared after each step, descriptors, threads and memory at the end.
"""

from __future__ import annotations

import copy
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from kvxfer.errors import KvxferError, PeerError, TransferError
from tests.fault.node import MEDIUM, Local, Node, Remote, Worker, footprint, until_within

SOAK_S: Final = float(os.environ.get("KVXFER_SOAK_S", "120"))
#: The transports of each process; the agent here has both.
TRANSPORTS: Final[tuple[tuple[str, ...], ...]] = (("shm",), ("tcp",), ("shm", "tcp"))
#: What happens while blocks move, and how often.
MEDDLING: Final = {
    "nothing": 60,
    "cancel": 15,
    "revoke": 15,
    "stop": 4,
    "disconnect": 4,
    "hang up": 4,
    "close": 1,
    "kill": 2,
}
#: The growth that is allowed at the end: descriptors of the last peers close a little later, and allocators
#: keep some memory.
MORE_DESCRIPTORS, MORE_NBYTES = 4, 48 << 20


class Play:
    """A peer in its own process, its share of the blocks, and the events with them."""

    def __init__(self, number: int, seed: int, hub: Node, start: Callable[[], Worker]) -> None:
        self.number = number
        self.random = random.Random(seed + number)
        # All plays share the agent and memory; peers, leases and works belong to this one.
        self.here = copy.copy(hub)
        self.here.peers, self.here.leases, self.here.works = [], [], []
        self._start = start
        self.there = start()
        self.blocks = hub.all[number :: len(TRANSPORTS)]
        self.value = 0
        self.steps: deque[str] = deque(maxlen=20)
        self.connect()

    def connect(self) -> None:
        """Either end dials."""
        name = f"play-{self.number}"
        if self.random.random() < 0.5:
            self.there.connect(self.here.address())
            self.here.accept(name)
        else:
            self.here.connect(self.there.address())
            self.there.accept("hub")

    def restart(self) -> None:
        self.there.finish()
        self.there = self._start()
        self.connect()

    def next_value(self) -> int:
        self.value = self.value % 60000 + 1
        return self.value

    def step(self) -> None:
        """Either end moves blocks in either direction, and an event happens meanwhile."""
        meddling = self.random.choices(list(MEDDLING), list(MEDDLING.values()))[0]
        verb = self.random.choice(["read", "write"])
        asks_here = self.random.random() < 0.5 or meddling in ("stop", "close", "kill")
        ids = self.random.sample(self.blocks, self.random.randrange(1, len(self.blocks)))
        self.steps.append(f"{'here' if asks_here else 'there'} {verb} {len(ids)}, {meddling}")
        asks, serves = self._ends(asks_here)
        src, dst = (serves, asks) if verb == "read" else (asks, serves)
        value = self.next_value()
        src.set(value, ids)
        dst.set(0, ids)
        serves.grant(verb, ids)
        token = serves.token()
        options = {"lease": token, "integrity": self.random.random() < 0.3}
        getattr(asks, verb)(ids, **options)

        if meddling in ("nothing", "stop"):
            if meddling == "stop":
                self.there.stop()
                self.there.resume()
            self._is_done(asks.end(), dst, ids, value, fails=False)
            serves.revoke()
        elif meddling in ("cancel", "revoke"):
            if meddling == "cancel":
                asks.cancel()
            else:
                serves.revoke()
                serves.set(fresh := self.next_value(), ids)
            error = asks.end()
            assert error is None or isinstance(error, TransferError), error
            if verb == "read" or meddling == "cancel":
                self._is_done(error, dst, ids, value)
            if meddling == "cancel":
                serves.revoke()
                serves.set(fresh := self.next_value(), ids)
            assert serves.is_all(fresh, ids), "bytes landed after the fence"
            assert self.here.peer_state() == ("open", "")
        else:
            self._loses(meddling, asks, dst, ids, value)
        for node in (self.here, self.there):
            node.forget()

    def _ends(self, asks_here: bool) -> tuple[Any, Any]:
        return (self.here, self.there) if asks_here else (self.there, self.here)

    def _loses(self, meddling: str, asks: Any, dst: Any, ids: list[int], value: int) -> None:
        """The session ends in the middle, and another one begins."""
        if meddling == "kill":
            self.there.kill()
        elif meddling == "close":
            self.there.close()
        else:
            (self.here if meddling == "disconnect" else self.there).disconnect()
        # A process whose agent is gone cannot be asked.
        error = asks.end()
        if meddling in ("disconnect", "hang up") or dst is self.here:
            self._is_done(error, dst, ids, value)
        self.here.wait_lost()
        if dst is self.here:
            dst.set(fresh := self.next_value(), ids)
            assert dst.is_all(fresh, ids)
        if meddling in ("kill", "close"):
            self.restart()
        else:
            self.there.wait_lost()
            self.connect()

    def _is_done(
        self, error: KvxferError | None, dst: Any, ids: list[int], value: int, fails: bool = True
    ) -> None:
        failed: set[int] = set()
        if error is not None:
            assert fails, error
            assert isinstance(error, PeerError | TransferError), error
            failed = set(error.failed_blocks.tolist())
            assert failed, error
            assert failed <= set(ids), error
        # Blocks that a failed transfer does not name are valid.
        assert dst.is_all(value, set(ids) - failed), f"done with other bytes: {error}"


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_whatever_happens_for_minutes_no_byte_is_wrong_and_nothing_is_left(
    local: Local, remote: Remote, seed: int
) -> None:
    hub = local("hub", "shm", MEDIUM, transports=("shm", "tcp"))
    plays = [
        Play(
            number,
            seed,
            hub,
            lambda number=number, kinds=kinds: remote(  # type: ignore[misc]
                f"play-{number}", kinds[0], MEDIUM, transports=kinds
            ),
        )
        for number, kinds in enumerate(TRANSPORTS)
    ]
    ended = threading.Event()

    def run(play: Play, until: float) -> int:
        count = 0
        try:
            while not ended.is_set() and time.monotonic() < until:
                play.step()
                count += 1
        except BaseException as error:
            ended.set()
            error.add_note(f"play {play.number}, step {count}; the last: {list(play.steps)}")
            raise
        return count

    def run_all(seconds: float) -> int:
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(len(plays)) as threads:
            return sum([done.result() for done in [threads.submit(run, play, until) for play in plays]])

    run_all(SOAK_S / 10)  # objects that are made once
    before, theirs = footprint(), [play.there.footprint() for play in plays]
    print("steps:", run_all(SOAK_S))
    hub.wait_idle()
    ends = [(before, footprint)]
    ends += [(first, play.there.footprint) for first, play in zip(theirs, plays, strict=True)]
    for first, now in ends:
        until_within(first, now, descriptors=MORE_DESCRIPTORS, nbytes=MORE_NBYTES)
