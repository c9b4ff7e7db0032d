"""Messages between real agents: in their order, as many as are read, and awake when room comes back."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, AgentOptions, ExhaustedError, Message, Peer, PeerError, UsageError
from kvxfer.errors import AgentError
from tests.waiting import until, until_on_loop

BOUND_S = 30.0
WINDOW = 1 << 20
LEAST, LONGEST = 4096, 1 << 16


class Ends:
    """Two agents, and each as the other's peer."""

    def __init__(self, here: Agent, there: Agent) -> None:
        self.here, self.there = here, there
        self.to_there = here.connect_blocking(there.address, BOUND_S)
        self.to_here = there.accept_blocking("here", BOUND_S)


@pytest.fixture(params=["loopback", "shm", "tcp"])
def options(request: pytest.FixtureRequest) -> AgentOptions:
    return AgentOptions(transports=(request.param,))


@pytest.fixture
def ends(options: AgentOptions) -> Iterator[Ends]:
    with Agent("here", options) as here, Agent("there", options) as there:
        yield Ends(here, there)


def fill(peer: Peer, nbytes: int = 0) -> int:
    """Sends until there is no room; returns the number of messages."""
    for sent in count():
        try:
            peer.send(bytes(nbytes))
        except ExhaustedError:
            return sent
    raise AssertionError


def send_all(peer: Peer, number: int, nbytes: int = 8) -> None:
    for each in range(number):
        peer.sendable_blocking(nbytes, BOUND_S)
        peer.send(each.to_bytes(nbytes, "little"))


def on_threads(*functions: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * BOUND_S)
        assert not thread.is_alive()
    assert not failed, failed


# ---- order ----------------------------------------------------------------------------------------


def test_a_thousand_each_way_come_in_their_order(ends: Ends) -> None:
    def read(agent: Agent, peer: Peer) -> None:
        for number in range(1000):
            message = agent.message_blocking(BOUND_S)
            assert message.peer is peer
            assert int.from_bytes(message.payload, "little") == number

    on_threads(
        lambda: send_all(ends.to_there, 1000),
        lambda: send_all(ends.to_here, 1000),
        lambda: read(ends.here, ends.to_there),
        lambda: read(ends.there, ends.to_here),
    )
    assert ends.here.stats()["messages_sent"] == ends.here.stats()["messages_in"] == 1000


async def test_a_loop_sends_more_than_there_is_room_for_and_goes_on_when_the_other_reads(ends: Ends) -> None:
    found: list[int] = []

    async def send() -> None:
        for number in range(2000):
            while True:
                try:
                    ends.to_there.send(number.to_bytes(LONGEST if number % 50 == 0 else 8, "little"))
                    break
                except ExhaustedError:
                    await ends.to_there.sendable()

    async def read() -> None:
        async for message in ends.there.messages():
            found.append(int.from_bytes(message.payload, "little"))
            if len(found) == 2000:
                return

    await asyncio.wait_for(asyncio.gather(send(), read()), 4 * BOUND_S)
    assert found == list(range(2000))


def test_an_engine_that_polls_reads_and_sends(ends: Ends) -> None:
    def echo() -> None:
        answered = 0
        while answered < 300:
            ends.there.poll()
            while (message := ends.there.take_message()) is not None:
                message.peer.send(message.payload)
                answered += 1

    def ask() -> None:
        for number in range(300):
            ends.to_there.send(b"%d" % number)
            while (message := ends.here.take_message()) is None:
                ends.here.poll()
            assert message == Message(ends.to_there, b"%d" % number)

    on_threads(echo, ask)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 256], ids=len)
def test_every_length_arrives(ends: Ends, payload: bytes) -> None:
    ends.to_there.send(payload)
    assert ends.there.message_blocking(BOUND_S) == Message(ends.to_here, payload)


async def test_each_goes_to_one_reader(ends: Ends) -> None:
    async def read() -> bytes:
        return (await ends.there.message()).payload

    for _ in range(20):
        waiting = [asyncio.create_task(read()) for _ in range(5)]
        waiting.append(
            asyncio.create_task(asyncio.to_thread(lambda: ends.there.message_blocking(BOUND_S).payload))
        )
        await asyncio.sleep(0)
        for number in range(6):
            ends.to_there.send(b"%d" % number)
        found = await asyncio.wait_for(asyncio.gather(*waiting), BOUND_S)
        assert sorted(found) == [b"%d" % number for number in range(6)]
    assert ends.there.take_message() is None


async def test_one_that_stops_waiting_loses_no_message(ends: Ends) -> None:
    for number in range(200):
        waiting = asyncio.create_task(ends.there.message())
        await asyncio.sleep(0)
        ends.to_there.send(b"%d" % number)
        for _ in range(number % 7):
            await asyncio.sleep(0)
        waiting.cancel()
        try:
            message = await waiting
        except asyncio.CancelledError:
            message = await ends.there.message(BOUND_S)
        assert message.payload == b"%d" % number


def test_agents_of_a_process_do_not_hear_each_others(options: AgentOptions) -> None:
    with Agent("hub", options) as hub, Agent("a", options) as a, Agent("b", options) as b:
        to_hub = {agent.name: agent.connect_blocking(hub.address, BOUND_S) for agent in (a, b)}
        back = {name: hub.accept_blocking(name, BOUND_S) for name in to_hub}
        for number in range(50):
            for name, peer in to_hub.items():
                peer.send(f"{name} {number}".encode())
        heard: dict[str, list[str]] = {"a": [], "b": []}
        for _ in range(100):
            message = hub.message_blocking(BOUND_S)
            assert message.peer is back[message.peer.name]
            heard[message.peer.name].append(message.payload.decode())
        assert heard == {name: [f"{name} {number}" for number in range(50)] for name in heard}
        back["b"].send(b"to b")
        assert b.message_blocking(BOUND_S).payload == b"to b"
        assert a.take_message() is None
        assert hub.take_message() is None


@pytest.mark.parametrize("how", ["a reader that waits", "a reader that polls"])
def test_mail_of_peers_that_are_long_gone_is_read_with_its_sender(how: str, options: AgentOptions) -> None:
    """More peers than an agent remembers by their numbers; each says something and leaves."""
    names = [f"worker-{number}" for number in range(80)]
    with Agent("hub", options) as hub:
        region = hub.register("kv", np.zeros((1, 8), np.uint8))
        token = region.grant(None, blocks=[0], mode="read", ttl_s=600).token
        incarnations = {}
        for name in names:
            with Agent(name, options) as worker:
                incarnations[name] = worker.incarnation
                to_hub = worker.connect_blocking(hub.address, BOUND_S)
                mine = worker.register("kv", np.zeros((1, 8), np.uint8))
                remote = to_hub.region_blocking("kv", BOUND_S)
                worker.read(mine, remote, [0], [0], lease=token, notify=name.encode()).wait(BOUND_S)
                to_hub.send(name.encode())
                num = len(incarnations)
                until(lambda: hub.stats()["messages_in"] == num == hub.stats()["transfers_done"])  # noqa: B023
        until(lambda: not hub.peers)
        for wait, take in (
            (hub.message_blocking, hub.take_message),
            (hub.notification_blocking, hub.take_notification),
        ):
            heard = [wait(BOUND_S) if how == "a reader that waits" else take() for _ in names]
            assert take() is None
            for name, mail in zip(names, heard, strict=True):
                assert mail is not None
                assert (mail.payload, mail.peer.name) == (name.encode(), name)
                assert mail.peer.incarnation == incarnations[name]
                assert mail.peer.state == "lost"


# ---- room -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "most"), [(0, WINDOW // LEAST), (LONGEST, WINDOW // LONGEST)])
def test_what_nobody_reads_is_bounded_at_both_ends(ends: Ends, nbytes: int, most: int) -> None:
    assert fill(ends.to_there, nbytes) == most
    with pytest.raises(
        ExhaustedError, match=r"peer\.sendable\(\), and let the peer read agent\.messages\(\)"
    ) as caught:
        ends.to_there.send(bytes(nbytes))
    assert (caught.value.code, caught.value.peer) == ("exhausted", "there")
    with pytest.raises(TimeoutError, match="there has no room for a message of 65536 bytes"):
        ends.to_there.sendable_blocking(timeout_s=0)
    # All messages have arrived and count against their sender's budget; both ends go on.
    while ends.there.stats()["messages_in"] < most:
        ends.there.poll()
    (row,) = ends.there.stats()["peers"]
    assert row["budget"]["message bytes"] == (WINDOW, WINDOW)
    ends.to_here.send(b"the other way has room of its own")
    assert ends.here.message_blocking(BOUND_S).peer is ends.to_there
    for _ in range(most):
        ends.there.message_blocking(BOUND_S)
    ends.to_there.sendable_blocking(timeout_s=BOUND_S)
    (row,) = ends.there.stats()["peers"]
    assert row["budget"]["message bytes"] == (0, WINDOW)


async def test_many_that_wait_for_room_are_woken(ends: Ends) -> None:
    fill(ends.to_there)
    waiting = [asyncio.create_task(ends.to_there.sendable(LEAST)) for _ in range(10)]
    waiting.append(asyncio.create_task(asyncio.to_thread(ends.to_there.sendable_blocking, LEAST, BOUND_S)))
    # Without room none of them ends.
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    for _ in range(WINDOW // LEAST // 4):
        await ends.there.message(BOUND_S)
    await asyncio.wait_for(asyncio.gather(*waiting), BOUND_S)


def test_what_cannot_be_sent_is_refused(ends: Ends) -> None:
    with pytest.raises(UsageError, match="a message has at most 65536 bytes, not 65537"):
        ends.to_there.send(bytes(LONGEST + 1))
    with pytest.raises(UsageError, match="a message must be bytes, not str"):
        ends.to_there.send("text")  # type: ignore[arg-type]
    assert ends.here.stats()["messages_sent"] == 0


# ---- the end --------------------------------------------------------------------------------------


def test_what_a_peer_that_is_lost_had_said_is_read(ends: Ends) -> None:
    for number in range(3):
        ends.to_there.send(b"%d" % number)
    ends.here.close()
    while ends.there.peers:
        ends.there.poll()
    for number in range(3):
        assert ends.there.message_blocking(BOUND_S) == Message(ends.to_here, b"%d" % number)
    assert ends.there.take_message() is None
    with pytest.raises(PeerError):
        ends.to_here.send(b"too late")
    with pytest.raises(PeerError):
        ends.to_here.sendable_blocking(timeout_s=BOUND_S)


def blocking_calls(agent: Agent) -> int:
    """Returns how many blocking calls of an agent wait."""
    return agent._completions._num_blocked


async def test_whoever_waits_for_room_hears_that_its_peer_is_lost(ends: Ends) -> None:
    fill(ends.to_there)
    waiting = asyncio.create_task(ends.to_there.sendable())
    blocked = asyncio.create_task(asyncio.to_thread(ends.to_there.sendable_blocking, timeout_s=BOUND_S))
    await until_on_loop(lambda: blocking_calls(ends.here) == 1)
    ends.to_here.disconnect()
    for task in (waiting, blocked):
        with pytest.raises(PeerError):
            await asyncio.wait_for(task, BOUND_S)


async def test_whoever_waits_hears_that_the_agent_closes(ends: Ends) -> None:
    fill(ends.to_there)
    stream = ends.here.messages()
    ending = asyncio.ensure_future(anext(stream, None))
    waiting = [
        asyncio.create_task(ends.here.message()),
        asyncio.create_task(asyncio.to_thread(ends.here.message_blocking, BOUND_S)),
        asyncio.create_task(ends.to_there.sendable()),
        asyncio.create_task(asyncio.to_thread(ends.to_there.sendable_blocking, timeout_s=BOUND_S)),
    ]
    await until_on_loop(lambda: blocking_calls(ends.here) == 2)
    await ends.here.aclose()
    assert await asyncio.wait_for(ending, BOUND_S) is None
    for task in waiting:
        with pytest.raises(AgentError):
            await asyncio.wait_for(task, BOUND_S)


def _answer(address: str, options: AgentOptions) -> None:
    with Agent("child", options) as agent:
        peer = agent.connect_blocking(address, BOUND_S)
        while (payload := agent.message_blocking(BOUND_S).payload) != b"end":
            peer.sendable_blocking(timeout_s=BOUND_S)
            peer.send(payload)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_another_process_answers(transport: str) -> None:
    options = AgentOptions(transports=(transport,))
    with Agent("parent", options) as agent:
        child = multiprocessing.get_context("spawn").Process(target=_answer, args=(agent.address, options))
        child.start()
        peer = agent.accept_blocking("child", BOUND_S)
        send_all(peer, 400, LEAST)  # few enough that the two ends do not both wait for room
        for number in range(400):
            assert int.from_bytes(agent.message_blocking(BOUND_S).payload, "little") == number
        peer.send(b"end")
        child.join(BOUND_S)
        assert child.exitcode == 0
