"""Agents and a directory that works, fails, is slow, or hangs: only callers that query it notice."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions
from kvxfer.directory import ChangeKind, Entry, InProcessDirectory
from kvxfer.errors import PeerError, UsageError
from tests.waiting import until, until_on_loop

BOUND_S = 60.0
SHORT_S = 0.05
# Of an agent whose entry is renewed: every 20 ms.
HASTY_TTL_S = 0.06


class Memory(np.ndarray[Any, Any]):
    """An array whose end can be seen."""


class Unwell(InProcessDirectory):
    """A directory whose verbs fail, or hang until `recover`; it counts what it is asked.

    Publishing fails, and hangs, when the entry is there, half done; renewing before it is renewed.
    """

    def __init__(self, *ailments: str, clock: Callable[[], float] | None = None) -> None:
        if clock is None:
            super().__init__()
        else:
            super().__init__(clock)
        self.ailments = set(ailments)
        self.recovered = threading.Event()
        self.asked: list[str] = []
        self.told: list[bool] = []

    def recover(self) -> None:
        self.ailments.clear()
        self.recovered.set()

    def _suffer(self, verb: str) -> None:
        self.asked.append(verb)
        if f"{verb} fails" in self.ailments:
            raise OSError("the directory is away")
        if f"{verb} hangs" in self.ailments:
            self.recovered.wait(BOUND_S)

    def publish(self, entry: Entry, ttl_s: float | None = None, *, replace: bool = True) -> bool:
        if not replace:
            self._suffer("renew")
        done = super().publish(entry, ttl_s, replace=replace)
        self.told.append(done)
        if replace:
            self._suffer("publish")
        return done

    def withdraw(self, name: str, incarnation: bytes) -> None:
        self._suffer("withdraw")
        super().withdraw(name, incarnation)

    def resolve_blocking(self, name: str, timeout_s: float) -> Entry:
        self._suffer("resolve")
        return super().resolve_blocking(name, timeout_s)

    async def resolve(self, name: str, timeout_s: float) -> Entry:
        self._suffer("resolve")
        return await super().resolve(name, timeout_s)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "kvxfer"):
        yield caplog


def close(agent: Agent, how: str, timeout_s: float) -> None:
    """Closes by either twin; the loop of the one that does not block goes on meanwhile."""
    if how == "close":
        agent.close(timeout_s)
        return

    async def on_a_loop() -> None:
        await agent.aclose(timeout_s)

    asyncio.run(on_a_loop())


CLOSES = pytest.mark.parametrize("how", ["close", "aclose"])


# ---- the end ----------------------------------------------------------------------------------------


@CLOSES
@pytest.mark.parametrize("ailment", ["fails", "hangs"])
def test_a_directory_that_does_not_let_go_stops_no_close(
    how: str, ailment: str, log: pytest.LogCaptureFixture
) -> None:
    directory = Unwell(f"withdraw {ailment}")
    agent, other = Agent("agent", directory=directory), Agent("other", directory=directory)
    gone = weakref.ref(array := np.zeros((16, 64), np.uint8).view(Memory))
    agent.register("kv", array)
    del array
    if ailment == "fails":
        with pytest.raises(OSError, match="away"):
            close(agent, how, 5.0)
    else:
        close(agent, how, SHORT_S)
        assert (
            "agent is closed, but its directory did not remove its entry within the timeout of close()"
            in log.text
        )
    assert agent.closed
    gc.collect()
    assert gone() is None
    with pytest.raises(PeerError):
        other.connect_blocking(agent.address)
    agent.close()  # and does not ask again
    assert directory.asked.count("withdraw") == 1
    directory.recover()
    if ailment == "hangs":  # the directory carries out the request late
        until(lambda: [entry.name for entry in directory.list()] == ["other"])
    other.close()
    assert "other" not in [entry.name for entry in directory.list()]


def test_fences_come_before_the_directory() -> None:
    seen: list[bool] = []

    class Looking(InProcessDirectory):
        def withdraw(self, name: str, incarnation: bytes) -> None:
            seen.append(agent._core.ended)
            super().withdraw(name, incarnation)

    agent = Agent("agent", directory=Looking())
    agent.close()
    assert seen == [True]


@pytest.mark.parametrize("how", ["with", "async with"])
def test_a_directory_that_fails_hides_no_error_of_the_block(how: str, log: pytest.LogCaptureFixture) -> None:
    directory = Unwell("withdraw fails")

    async def on_a_loop() -> None:
        async with Agent("agent", directory=directory):
            raise KeyError("of the block")

    def on_a_thread() -> None:
        with Agent("agent", directory=directory):
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        on_a_thread() if how == "with" else asyncio.run(on_a_loop())
    assert "the directory is away" in log.text
    with pytest.raises(OSError, match="away"), Agent("agent", directory=directory):
        pass


def test_many_agents_close_at_once_beside_a_directory_that_hangs() -> None:
    directory = Unwell("withdraw hangs")
    agents = [Agent(f"agent-{number}", directory=directory) for number in range(8)]
    threads = [threading.Thread(target=agent.close, args=(SHORT_S,)) for agent in agents for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert all(agent.closed for agent in agents)
    directory.recover()
    until(lambda: not directory.list())


# ---- the beginning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ailment", ["fails", "hangs"])
def test_an_agent_that_cannot_be_published_is_closed_and_not_left_there(ailment: str) -> None:
    directory = Unwell(f"publish {ailment}")
    options = AgentOptions(connect_timeout_s=SHORT_S)
    expected = OSError if ailment == "fails" else PeerError
    with Agent("other") as other:
        with pytest.raises(expected, match=r"away|within 0\.05 s \(option connect_timeout_s") as kept:
            Agent("agent", options, directory=directory)
        (entry,) = directory.list() or (None,)
        if entry is not None:
            with pytest.raises(PeerError, match="cannot connect"):
                other.connect_blocking(entry.address)
        directory.recover()
        until(lambda: not directory.list())
        assert kept.value is not None  # the exception keeps its frames, and their variables


def test_an_agent_that_accepts_nobody_is_not_published() -> None:
    directory = InProcessDirectory()
    with Agent("silent", listen="", directory=directory) as agent, Agent("b", directory=directory) as other:
        assert [entry.name for entry in directory.list()] == ["b"]
        assert agent.connect_blocking("b", BOUND_S).incarnation == other.incarnation
    assert directory.list() == ()


def test_what_is_said_of_an_agent_is_published() -> None:
    directory = InProcessDirectory()
    watch = directory.watch_blocking("decode", BOUND_S)
    with (
        Agent("prefill-0", directory=directory),
        Agent("decode-0", directory=directory, metadata={"role": "decode"}) as agent,
    ):
        change = next(watch)
        assert change.kind is ChangeKind.ADDED
        assert (
            change.entry
            == agent.entry
            == Entry("decode-0", agent.address, agent.incarnation, {"role": "decode"})
        )
    assert next(watch).kind is ChangeKind.REMOVED
    with pytest.raises(UsageError, match="at most 32 items"):
        Agent("decode-0", directory=directory, metadata={str(number): "" for number in range(33)})
    assert directory.list() == ()


# ---- time to live -------------------------------------------------------------------------------------


def test_an_entry_is_renewed_for_as_long_as_its_agent_lives(log: pytest.LogCaptureFixture) -> None:
    """Also by a directory that fails meanwhile, or has forgotten everything; and no longer than that."""
    now_s = [0.0]
    directory = Unwell(clock=lambda: now_s[0])
    options = AgentOptions(directory_ttl_s=HASTY_TTL_S)
    agents = [Agent(name, options, directory=directory) for name in ("a", "b")]
    lasting = Agent("lasting", directory=directory)

    def renewed() -> Callable[[], bool]:
        before = directory.asked.count("renew")
        return lambda: directory.asked.count("renew") >= before + 4  # of both, begun after this

    for _ in range(5):
        until(renewed())
        now_s[0] += HASTY_TTL_S / 2
        assert {entry.name for entry in directory.list()} == {"a", "b", "lasting"}
    directory.ailments.add("renew fails")
    until(renewed())
    directory.recover()
    assert log.text.count("a could not renew its entry in its directory: OSError: the directory is away") == 1
    for agent in agents:
        directory.withdraw(agent.name, agent.incarnation)  # as one that was restarted
    until(renewed())
    assert {entry.name for entry in directory.list()} == {"a", "b", "lasting"}
    # One agent is closed. The other is only dropped, which counts as dead.
    renewing = [agent._publication._publishing for agent in agents if agent._publication]
    agents.pop().close()
    assert {entry.name for entry in directory.list()} == {"a", "lasting"}
    agents.clear()
    del agent
    gc.collect()
    for thread in renewing:
        assert thread is not None
        thread.join(BOUND_S)
        assert not thread.is_alive()
    now_s[0] += 2 * HASTY_TTL_S
    assert {entry.name for entry in directory.list()} == {"lasting"}
    lasting.close()


def test_a_late_renewal_brings_nobody_back() -> None:
    directory = Unwell("renew hangs", clock=lambda: 0.0)
    agent = Agent("agent", AgentOptions(directory_ttl_s=HASTY_TTL_S), directory=directory)
    until(lambda: "renew" in directory.asked)
    agent.close(SHORT_S)
    assert agent._publication is not None
    renewing = agent._publication._publishing
    assert renewing is not None
    assert renewing.is_alive()
    directory.recover()
    renewing.join(BOUND_S)
    until(lambda: not directory.list())


def test_an_agent_restarted_under_its_name_keeps_it(log: pytest.LogCaptureFixture) -> None:
    """Its predecessor, which is not dead yet, neither renews itself over it nor withdraws it."""
    directory = Unwell()
    options = AgentOptions(directory_ttl_s=2.0)  # longer than a loaded machine keeps the second from renewing
    first, reader = Agent("decode-0", options, directory=directory), Agent("reader", directory=directory)
    old = first.entry
    assert reader.connect_blocking("decode-0").incarnation == first.incarnation
    second = Agent("decode-0", options, directory=directory)
    until(lambda: False in directory.told)
    assert directory.resolve_blocking("decode-0", 0) == second.entry
    first.close()
    assert "decode-0 could not renew its entry in its directory: another agent has its name" in log.text
    assert reader.connect_blocking("decode-0").incarnation == second.incarnation
    with pytest.raises(PeerError):
        reader.connect_blocking(old)
    for agent in (second, reader):
        agent.close()


# ---- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["coroutine", "blocking"])
def test_a_directory_that_does_not_answer_does_not_outlast_connect(how: str) -> None:
    """Holds even if the directory blocks its caller: the loop goes on; a late answer is not dialled."""
    directory = Unwell()
    with Agent("there", directory=directory) as there, Agent("here", directory=directory) as here:
        directory.ailments.add("resolve hangs")
        words = r"no session with there within 0\.05 s \(timeout_s\): its name is still being looked up"
        connecting = partial(here.connect_blocking, "there", SHORT_S)
        if how == "coroutine":
            connecting = partial(asyncio.run, here.connect("there", SHORT_S))
        with pytest.raises(PeerError, match=words) as caught:
            connecting()
        assert caught.value.code == "no-answer"
        assert not directory.recovered.is_set(), "connect came back before the directory"
        directory.recover()
        until(lambda: not any(thread.name == "kvxfer-dial" for thread in threading.enumerate()))
        assert not there.peers
        assert here.connect_blocking("there").incarnation == there.incarnation


def test_who_gives_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.session.name_lookup._ASK_S", 0.01)
    directory = InProcessDirectory()
    with Agent("here", directory=directory) as here:

        async def on_a_loop() -> None:
            waiting = [asyncio.create_task(here.connect("nobody", 1e9)) for _ in range(3)]
            await until_on_loop(lambda: directory._waiting)
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)

        asyncio.run(on_a_loop())
        until(lambda: not any(thread.name == "kvxfer-dial" for thread in threading.enumerate()))
        assert not directory._waiting


def test_a_name_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a directory is asked at a time."""
    monkeypatch.setattr("kvxfer.session.name_lookup._ASK_S", 0.01)
    directory = Unwell()
    with Agent("here", directory=directory) as here:
        found: list[bytes] = []
        thread = threading.Thread(
            target=lambda: found.append(here.connect_blocking("there", BOUND_S).incarnation)
        )
        thread.start()
        until(lambda: directory.asked.count("resolve") > 3)
        with Agent("there", directory=directory) as there:
            thread.join(BOUND_S)
            assert found == [there.incarnation]


def test_a_directory_that_hangs_keeps_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.session.name_lookup._MOST_AT_ONCE", 2)
    directory = Unwell("resolve hangs")
    with Agent("here", directory=directory) as here:
        for _ in range(5):
            with pytest.raises(PeerError, match=r"within 0\.02 s"):
                here.connect_blocking("there", 0.02)
        until(lambda: sum(thread.name == "kvxfer-dial" for thread in threading.enumerate()) <= 2)
        assert directory.asked.count("resolve") == 2
        directory.recover()


@pytest.mark.parametrize("how", ["coroutine", "blocking"])
def test_a_directory_that_is_away_is_said_at_once(how: str) -> None:
    words = r"'there' cannot be looked up: .*the directory is away"
    with Agent("here", directory=Unwell("resolve fails")) as here:

        def connect() -> None:
            if how == "blocking":
                here.connect_blocking("there", BOUND_S)
            else:
                asyncio.run(here.connect("there", BOUND_S))

        with pytest.raises(PeerError, match=words) as caught:
            connect()
        assert caught.value.code == "unreachable"


def test_an_address_of_another_agent_is_not_taken_for_the_one_that_is_meant() -> None:
    """An agent died and the directory has not noticed: another has its port by now."""
    directory = InProcessDirectory()
    with Agent("here", directory=directory) as here, Agent("stranger") as stranger:
        directory.publish(Entry("decode-0", stranger.address, bytes(16)))
        with pytest.raises(
            PeerError, match="is stranger with another incarnation of decode-0 than"
        ) as caught:
            here.connect_blocking("decode-0")
        assert caught.value.code == "peer-restarted"
        until(lambda: not stranger.peers and not here.peers)
