"""completion: events reach their waiters, on any loop or thread, and no other task."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer.agent import Agent
from kvxfer.errors import AgentError
from kvxfer.session import completion
from kvxfer.session.completion import ANY, NOTIFICATION, Completions


@pytest.fixture
def ring(fake_core: list[Any]) -> tuple[Any, Completions]:
    agent = Agent("prefill")
    return fake_core[0], agent._completions


async def test_a_waiter_wakes_for_its_key_alone(ring: tuple[Any, Completions]) -> None:
    core, completions = ring
    over: set[int] = set()

    def wait_for(number: int) -> asyncio.Task[bool]:
        return asyncio.create_task(completions.until(("lease", number), lambda: number in over))

    waiters = {number: wait_for(number) for number in (1, 2)}
    await asyncio.sleep(0)
    over.update((1, 2))
    core.happen("lease-ended", lease=1)
    await waiters[1]
    assert not waiters[2].done()
    core.happen("lease-ended", lease=2)
    await waiters[2]
    assert not completions._waiters


@pytest.mark.parametrize("timeout_s", [0, 0.001])
async def test_when_the_time_is_over_it_says_so_and_leaves_nothing(
    ring: tuple[Any, Completions], timeout_s: float
) -> None:
    _, completions = ring
    assert not await completions.until(("peer", 3), lambda: False, timeout_s)
    assert await completions.until(("peer", 3), lambda: True, timeout_s)
    assert not completions._waiters


async def test_cancelling_leaves_nothing(ring: tuple[Any, Completions]) -> None:
    _, completions = ring
    waiting = asyncio.create_task(completions.until(("peer", ANY), lambda: False))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert not completions._waiters


def test_what_comes_between_the_last_look_and_the_sleep_is_seen(ring: tuple[Any, Completions]) -> None:
    core, completions = ring
    core.add_peer(1, "decode")
    num_looks = 0

    def is_over() -> bool:
        nonlocal num_looks
        num_looks += 1
        if core.mail["notification"]:
            return True
        if num_looks == 2:  # the first is before spinning
            core.happen("notification", peer=1, payload=b"x")
        return False

    # Without bound: a wake-up that is lost is a thread that never ends.
    thread = threading.Thread(target=lambda: completions.block_until(is_over, None), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert num_looks == 3


def test_blocking_gives_up_in_time(ring: tuple[Any, Completions]) -> None:
    _, completions = ring
    assert not completions.block_until(lambda: False, 0.0)
    assert not completions.block_until(lambda: False, 0.001)
    assert not completions._driver


def test_what_blocked_threads_slept_on_is_closed_with_the_agent(ring: tuple[Any, Completions]) -> None:
    _, completions = ring
    # Any time limit may run out before a thread first sleeps.
    assert completions.block_until(lambda: completions._wake_fd >= 0, 60)
    slept_on = completions._wake_fd
    os.fstat(slept_on)
    completions.shut(AgentError("closed by the test", code="closed"))
    assert completions._wake_fd == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(slept_on)


async def test_whoever_waits_says_so_before_the_last_look(ring: tuple[Any, Completions]) -> None:
    core, completions = ring
    told = []

    def is_over() -> bool:
        told.append(core.num_waiters)
        return len(told) == 3

    waiting = asyncio.create_task(completions.until(("handle", 1), is_over))
    await asyncio.sleep(0)
    core.happen("ended", handle=1)
    await waiting
    assert told == [0, 1, 1]
    assert core.num_waiters == 0

    def never() -> bool:
        told.append(core.num_waiters)
        return False

    assert not completions.block_until(never, 0.01)
    assert told[-1] == 1
    assert core.num_waiters == 0


async def rest() -> None:
    """Lets the loop look at its descriptors, several times."""
    for _ in range(5):
        await asyncio.sleep(0)


def watches_sockets(core: Any) -> bool:
    """Returns whether the running loop watched the sockets, and removes the watch."""
    return asyncio.get_running_loop().remove_reader(core.sockets_fd)


async def test_a_loop_serves_while_notifications_are_awaited(ring: tuple[Any, Completions]) -> None:
    core, completions = ring
    core.serves = True
    over = False
    waiting = asyncio.create_task(completions.until(NOTIFICATION, lambda: over))
    await rest()
    assert core.num_served == 0
    for served in (1, 2):
        os.eventfd_write(core.sockets_fd, 1)
        await rest()
        assert core.num_served == served
    over = True
    core.happen("notification", peer=1, payload=b"x")
    await waiting
    os.eventfd_write(core.sockets_fd, 1)
    await rest()
    assert (core.num_served, core.num_left) == (2, 1)
    assert not watches_sockets(core)


async def test_what_is_long_is_the_threads_until_somebody_waits_anew(ring: tuple[Any, Completions]) -> None:
    core, completions = ring
    core.serves, core.leaves = True, 1
    looks = iter([False, False, False, True])
    waiting = asyncio.create_task(completions.until(NOTIFICATION, lambda: next(looks)))
    await asyncio.sleep(0)
    os.eventfd_write(core.sockets_fd, 1)  # stays readable: the thread has not come to it yet
    await rest()
    assert core.num_served == 1
    core.happen("notification", peer=1, payload=b"x")  # not the event that the task waits for: it waits again
    await rest()
    assert core.num_served == 2
    core.happen("notification", peer=1, payload=b"y")
    await waiting


async def test_who_waits_for_something_else_after_a_notification_has_the_thread_back(
    ring: tuple[Any, Completions],
) -> None:
    """A usual handler: a notification names what to fetch, and the task awaits that."""
    core, completions = ring
    core.serves = True
    looks = iter([False, False, True])
    noted = asyncio.create_task(completions.until(NOTIFICATION, lambda: next(looks)))
    await rest()
    core.happen("notification", peer=1, payload=b"x")
    await noted
    assert core.num_left == 0
    fetching = asyncio.create_task(completions.until(("handle", 1), lambda: False))
    await rest()
    assert core.num_left == 1
    assert not watches_sockets(core)
    fetching.cancel()


@pytest.mark.parametrize(
    ("key", "serves"), [(("handle", 1), True), (("peer", ANY), True), (NOTIFICATION, False)]
)
async def test_a_loop_leaves_the_sockets_alone_for_other_waits_and_where_they_are_the_threads(
    ring: tuple[Any, Completions], key: tuple[str, int], serves: bool
) -> None:
    core, completions = ring
    core.serves = serves
    waiting = asyncio.create_task(completions.until(key, lambda: False))
    await rest()
    assert not watches_sockets(core)
    waiting.cancel()


@pytest.mark.parametrize("from_here", [True, False])
async def test_a_close_takes_the_sockets_out_of_the_loop(
    ring: tuple[Any, Completions], from_here: bool
) -> None:
    core, completions = ring
    core.serves = True
    waiting = asyncio.create_task(completions.until(NOTIFICATION, lambda: False))
    await rest()
    if from_here:
        completions.stop_watching()
    else:
        await asyncio.to_thread(completions.stop_watching)
    await rest()
    assert not watches_sockets(core)
    completions.shut(AgentError("closed by the test", code="closed"))
    with pytest.raises(AgentError, match="closed by the test"):
        await waiting


def test_the_child_of_a_fork_is_told(ring: tuple[Any, Completions]) -> None:
    _, completions = ring
    completions.check()
    completion._after_fork_in_child()
    with pytest.raises(AgentError, match="forked") as caught:
        completions.check()
    assert caught.value.code == "forked"
