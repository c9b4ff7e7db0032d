"""close() releases memory when nothing serves it, and wakes callers in the middle of a call with an error."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, Lease, Peer, Transfer
from kvxfer.errors import AgentError, KvxferError, NoAnswerError, PeerError, TransferError, UsageError
from tests.waiting import until

BOUND_S = 60.0


class Memory(np.ndarray[Any, Any]):
    """An array whose end can be seen."""


def memory(value: int = 0) -> Memory:
    return np.full((16, 64), value, np.uint8).view(Memory)


# ---- memory ---------------------------------------------------------------------------------------


def test_memory_of_agents_that_were_dropped_is_kept_while_it_is_served() -> None:
    """A handle keeps its agent alive when all other references are dropped; the peer may still write."""
    here, there = Agent("here"), Agent("there")
    source = here.register("kv", memory(7))
    target = memory()
    gone = weakref.ref(target)
    region = there.register("kv", target)
    remote = here.connect_blocking(there.address).region_blocking("kv")
    region.grant(there.accept_blocking("here"), mode="write", ttl_s=60)
    incoming = there.expect(b"never", [1], region)
    address = target.ctypes.data
    del there, region, target
    gc.collect()
    assert gone() is not None
    assert gone().ctypes.data == address  # type: ignore[union-attr]
    here.write(source, remote, [1], [2]).wait(BOUND_S)
    assert (gone()[2] == 7).all()  # type: ignore[index]
    del incoming
    gc.collect()
    assert gone() is None
    here.close()


@pytest.mark.parametrize("end", ["deregister", "close", "drop"])
def test_memory_is_let_go_at_the_end(end: str) -> None:
    agent = Agent("agent")
    array = memory()
    gone = weakref.ref(array)
    region = agent.register("kv", array)
    del array
    gc.collect()
    assert gone() is not None
    if end == "deregister":
        region.deregister_blocking()
    elif end == "close":
        agent.close()
    else:
        del agent, region
    gc.collect()
    assert gone() is None


def test_the_second_of_two_threads_that_close_returns_after_the_end() -> None:
    for _ in range(20):
        agent = Agent("agent")
        gone = weakref.ref(array := memory())
        agent.register("kv", array)
        del array
        seen: list[bool] = []

        def close(agent: Agent = agent, seen: list[bool] = seen) -> None:
            agent.close()
            seen.append(agent._core.ended)

        threads = [threading.Thread(target=close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [True] * 3
        gc.collect()
        assert gone() is None


# ---- connecting -----------------------------------------------------------------------------------


def silent_listener() -> Any:
    """A socket whose connections the kernel's queue accepts, and that never sends anything."""
    import socket

    return socket.create_server(("127.0.0.1", 0))


@pytest.mark.parametrize("given", [0.05, None])
def test_connecting_to_one_who_says_nothing_ends_and_names_the_limit(given: float | None) -> None:
    options = AgentOptions(connect_timeout_s=0.05, transports=("tcp",))
    with Agent("here", options) as here, silent_listener() as server:
        target = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(NoAnswerError, match=r"time to connect|within 0\.05 s") as caught:
            here.connect_blocking(target, given)
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(PeerError, match=r"time to connect|within 0\.05 s"):
            asyncio.run(here.connect(target, given))
        assert not here.peers


@pytest.mark.parametrize(
    ("given", "limit"), [(0.01, r"0.01 s \(timeout_s\)"), (None, r"0.02 s \(option connect_timeout_s\)")]
)
def test_a_session_that_does_not_settle_is_given_up(
    monkeypatch: pytest.MonkeyPatch, given: float | None, limit: str
) -> None:
    """The caller's timeout ends the attempt in any state, and both ends drop the session."""
    from kvxfer.session.peer_table import PeerTable

    monkeypatch.setattr(PeerTable, "settled", lambda self, peer_id: False)
    monkeypatch.setattr("kvxfer.session.connecting._LAST_WORD_S", 0.0)
    with Agent("here", AgentOptions(connect_timeout_s=0.02)) as here, Agent("there") as there:
        peers: list[Peer] = []
        monkeypatch.setattr(PeerTable, "opened", lambda self, peer_id, target: pytest.fail("it opened"))
        core = here._core
        held = Held(core)
        monkeypatch.setattr(here, "_core", held)
        for connect in (here.connect_blocking, lambda *args: asyncio.run(here.connect(*args))):
            with pytest.raises(PeerError, match=rf"no session with .* within {limit}: there answered"):
                connect(there.address, given)
            until(lambda: not there.peers and not here.peers)
        assert not peers


class Held:
    """A native agent whose sessions never get a rail."""

    def __init__(self, core: Any) -> None:
        self.core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def peer(self, peer_id: int) -> dict[str, Any]:
        return {**self.core.peer(peer_id), "name": "there", "state": "connecting", "notes": []}


async def test_a_cancelled_connect_leaves_no_session_at_either_end() -> None:
    async with Agent("here") as here, Agent("there") as there:
        for turns in range(12):
            connecting = asyncio.ensure_future(here.connect(there.address))
            for _ in range(turns):
                await asyncio.sleep(0)
            was_done = connecting.done()
            connecting.cancel()
            try:
                peer = await connecting
            except asyncio.CancelledError:
                pass
            else:
                assert was_done
                peer.disconnect()
            await asyncio.to_thread(until, lambda: not there.peers and not here.peers)
        assert (await here.connect(there.address)).state == "open"


# ---- limits ---------------------------------------------------------------------------------------


def test_a_region_too_many_is_refused_and_ends_no_session() -> None:
    # The test makes thousands of calls, and on a busy machine an agent must not count as silent meanwhile.
    options = AgentOptions(silent_timeout_s=BOUND_S)
    with Agent("here", options) as here, Agent("there", options) as there:
        peer = here.connect_blocking(there.address)
        pages = np.zeros((2, 8), np.uint8)
        regions = [here.register(f"r{number}", pages) for number in range(4096)]
        for _ in range(2):
            with pytest.raises(UsageError, match="has 4096 regions") as caught:
                here.register("more", pages)
            assert caught.value.code == "exhausted"
        assert len(here.regions) == 4096
        back = there.accept_blocking("here", BOUND_S)
        assert back.region_blocking("r4095", BOUND_S).name == "r4095"
        assert (peer.state, back.state) == ("open", "open")
        regions[0].deregister_blocking()
        here.register("more", pages)
        back.region_blocking("more")
        assert (peer.state, back.state) == ("open", "open")


# ---- races ----------------------------------------------------------------------------------------


def verbs_of(here: Agent, there: Agent, draw: random.Random) -> list[Callable[[], Any]]:
    """Every public verb of an agent and its objects, on two agents with a region each."""
    source = here.register("kv", memory(1))
    target = there.register("kv", memory())
    peer = here.connect_blocking(there.address)
    back = there.accept_blocking("here")
    remote = peer.region_blocking("kv")
    lease = target.grant(back, mode="write", ttl_s=60)
    trigger = here.trigger()
    ring = here.command_ring(16)
    prepared = ring.prepare_write(source, remote, [1], [2])
    incoming = there.expect(b"tag", [1], target)

    def write(**options: Any) -> Transfer:
        return here.write(source, remote, [1, 3], [2, 4], timeout_s=5, **options)

    def held() -> None:
        transfer = write(hold=True)
        transfer.mark_ready(1)
        transfer.cancel()
        _ = transfer.error, transfer.failed_blocks, transfer.stages, transfer.state

    def more() -> None:
        region = here.register(f"more{draw.random()}", memory())
        _ = region.kind
        region.deregister_blocking()

    def expect() -> None:
        found = there.expect(str(draw.random()).encode(), [1, 2], target)
        found.layer_arrived(0)
        found.cancel()
        found.wait(BOUND_S)

    def bearer() -> None:
        granted = target.grant(None, [draw.randrange(16)])
        assert granted.state
        granted.revoke_blocking()
        granted.ended_blocking(BOUND_S)

    def commands() -> None:
        more = here.command_ring(8)
        write = more.prepare_write(source, remote, [1], [2])
        more.start(write, 0)
        more.take_failures()
        write.forget()
        more.close()

    def awaited(make: Callable[[], Any]) -> Callable[[], None]:
        async def run() -> None:
            await asyncio.wait_for(make(), 0.01)

        return lambda: asyncio.run(run())

    async def first_note() -> None:
        async for _ in there.notifications():
            return

    async def of(work: Any) -> None:
        await work

    return [
        lambda: write().wait(BOUND_S),
        lambda: write(after=trigger).cancel(),
        awaited(lambda: of(write(notify=b"note"))),
        awaited(first_note),
        awaited(lambda: here.accept("ghost")),
        awaited(lambda: here.connect(there.address)),
        awaited(lambda: peer.region("none")),
        awaited(lambda: incoming.layer(0)),
        awaited(lambda: of(incoming)),
        awaited(lease.ended),
        awaited(lambda: of(lease)),
        awaited(there.message),
        awaited(there.notification),
        awaited(peer.sendable),
        awaited(lambda: ring.ended(100)),
        held,
        more,
        expect,
        bearer,
        commands,
        lambda: here.read(source, back_regions(peer), [1], [2], timeout_s=5).wait(BOUND_S),
        lambda: here.connect_blocking(there.address, 5).disconnect(),
        lambda: here.accept_blocking("ghost", 0.001),
        lambda: there.notification_blocking(0.001),
        lambda: there.take_notification(),
        lambda: peer.send(b"message"),
        lambda: peer.sendable_blocking(1, 0.001),
        lambda: there.message_blocking(0.001),
        lambda: there.take_message(),
        lambda: target.grant(back, [1]).wait(BOUND_S),
        lambda: incoming.layer_blocking(0, 0.001),
        lambda: incoming.wait(0.001),
        lambda: lease.ended_blocking(0.001),
        lambda: peer.region_blocking("none", 0.001),
        lambda: ring.ended_blocking(100, 0.001),
        lambda: ring.start(prepared, 0),
        lambda: (
            ring.num_taken,
            ring.num_ended,
            ring.num_failed,
            ring.take_failures(),
            ring.closed,
            repr(ring),
        ),
        lambda: (here.stats(), there.stats()),
        lambda: (here.poll(), there.poll()),
        lambda: (here.peers, here.regions, here.address, here.incarnation, here.closed, repr(here)),
        lambda: (peer.state, peer.rails, peer.notes, peer.error, repr(peer)),
        lambda: (dict(peer.regions), back.regions.keys()),
        lambda: (lease.state, lease.active, repr(lease)),
        lambda: (source.kind, source.descriptor, repr(source)),
        lambda: (incoming.state, incoming.error, repr(incoming)),
        lambda: (trigger.fire(1), trigger.value),  # type: ignore[func-returns-value]
    ]


def back_regions(peer: Peer) -> Any:
    return peer.regions["kv"]


DOCUMENTED = (AgentError, PeerError, TransferError, UsageError, TimeoutError)


@pytest.mark.parametrize("seed", range(8), indirect=True)
def test_every_verb_beside_a_close_raises_what_is_documented(seed: int) -> None:
    """Each thread runs the verbs in its own order while another closes one agent, then the other."""
    draw = random.Random(seed)
    here, there = Agent("here"), Agent("there")
    verbs = verbs_of(here, there, draw)
    surprises: list[str] = []
    begun = threading.Barrier(5)

    def work(order: list[Callable[[], Any]]) -> None:
        begun.wait()
        for verb in order:
            try:
                verb()
            except DOCUMENTED as error:
                # A close must not look like the caller's mistake; a race with deregister or disconnect may.
                if isinstance(error, UsageError) and error.code not in ("unknown-region", "invalid-argument"):
                    surprises.append(f"seed {seed}: {error!r}")
            except BaseException as error:
                surprises.append(f"seed {seed}: {type(error).__module__}.{error!r}")

    threads = []
    for _ in range(4):
        order = draw.choices(verbs, k=60)
        threads.append(threading.Thread(target=work, args=(order,)))
    for thread in threads:
        thread.start()
    begun.wait()
    for _ in range(draw.randrange(300)):
        here.stats()
    first, second = (here, there) if draw.random() < 0.5 else (there, here)
    first.close()
    for _ in range(draw.randrange(50)):
        _ = second.closed
    second.close()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive(), f"seed {seed}: a verb does not return"
    assert not surprises, "\n".join(surprises)
    # After close() each verb raises at once, or returns what the agent knew before.
    for verb in verbs:
        try:
            verb()
        except (KvxferError, TimeoutError):
            pass


@pytest.mark.parametrize("how", ["with", "async with"])
def test_the_end_of_a_lease_hides_no_error_of_its_block(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another thread is closing the agent, whose native half has ended already."""

    async def in_a_coroutine(agent: Agent, lease: Lease) -> None:
        async with lease:
            agent._core.close(0.0)
            raise LookupError("the block's")

    def on_a_thread(agent: Agent, lease: Lease) -> None:
        with lease:
            agent._core.close(0.0)
            raise LookupError("the block's")

    with Agent("here") as agent:
        lease = agent.register("kv", memory()).grant(None, blocks=[1], mode="read")
        with pytest.raises(LookupError, match="the block's"):
            on_a_thread(agent, lease) if how == "with" else asyncio.run(in_a_coroutine(agent, lease))
        assert "revoking a lease of any peer" in caplog.text
        with pytest.raises(AgentError), lease:
            pass
