"""Kinds, times and whole numbers: every verb takes the same ones, and refuses others before all else."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, Group, KVLayout, LeaseToken, Pool
from kvxfer.directory.in_process import InProcessDirectory
from kvxfer.errors import KvxferError, TransferError, UsageError

NAN = float("nan")
NO_TIMES = (NAN, np.float32(NAN), -1, -1e-9, -(10**400), float("-inf"), True, np.True_, "5", b"5", [5])
TIMES = (0.001, 0, np.float32(0.001), np.float64(0), np.int64(0), np.uint8(0), Fraction(1, 1000))
LONG_TIMES = (float("inf"), 1e300, 10**400, np.float32("inf"), 2**63)
NO_COUNTS = (True, np.True_, "1", 1.0, np.float32(1), float("nan"), float("inf"), [1], -1, 10**400)


class Ends:
    """Two agents with a region each and something pending of every kind."""

    def __init__(self) -> None:
        self.here, self.there = Agent("here"), Agent("there", directory=InProcessDirectory())
        self.source = self.here.register("kv", np.ones((16, 64), np.uint8))
        self.region = self.there.register("kv", np.zeros((16, 64), np.uint8))
        self.peer = self.here.connect_blocking(self.there.address)
        self.back = self.there.accept_blocking("here")
        self.remote = self.peer.region_blocking("kv")
        self.lease = self.region.grant(self.back, mode="write", ttl_s=60)
        self.pending = self.here.write(self.source, self.remote, [1], [2], hold=True)
        self.incoming = self.there.expect(b"tag", [1], self.region)
        self.trigger = self.here.trigger()
        self.ring = self.here.command_ring(8)
        self.prepared = self.ring.prepare_write(self.source, self.remote, [1], [2])
        self.pool = Pool(4, 64)

    def state(self) -> tuple[Any, ...]:
        """What a refused call leaves as it was."""
        return (
            *(agent.stats()["transfers_open"] for agent in (self.here, self.there)),
            len(self.here.peers),
            set(self.here.regions),
            set(self.there.regions),
            self.lease.state,
            self.pending.state,
            self.incoming.state,
            self.trigger.value,
            self.ring.num_taken,
            self.pool.num_free,
        )

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture(scope="module")
def kept() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


Verb = Callable[[Ends, Any], Any]

# Verbs that take a time, each with one that is over at once: TimeoutError, or an error that says so.
TIMED: dict[str, Verb] = {
    "Agent.accept": lambda e, t: e.here.accept("ghost", t),
    "Agent.accept_blocking": lambda e, t: e.here.accept_blocking("ghost", t),
    "Agent.connect": lambda e, t: e.here.connect(e.there.address, t),
    "Agent.connect_blocking": lambda e, t: e.here.connect_blocking(e.there.address, t),
    "Agent.connect(name)": lambda e, t: e.there.connect("ghost", t),
    "Agent.connect_blocking(name)": lambda e, t: e.there.connect_blocking("ghost", t),
    "Agent.notification": lambda e, t: e.here.notification(t),
    "Agent.message": lambda e, t: e.here.message(t),
    "Agent.message_blocking": lambda e, t: e.here.message_blocking(t),
    "Agent.notification_blocking": lambda e, t: e.here.notification_blocking(t),
    "Agent.write": lambda e, t: e.here.write(e.source, e.remote, [1], [2], timeout_s=t),
    "Agent.read": lambda e, t: e.here.read(e.source, e.remote, [1], [2], timeout_s=t),
    "Agent.expect": lambda e, t: e.there.expect(b"other", [3], e.region, timeout_s=t),
    "CommandRing.ended": lambda e, t: e.ring.ended(1, t),
    "CommandRing.ended_blocking": lambda e, t: e.ring.ended_blocking(1, t),
    "CommandRing.prepare_write": lambda e, t: e.ring.prepare_write(e.source, e.remote, [1], [2], timeout_s=t),
    "Lease.ended": lambda e, t: e.lease.ended(t),
    "Lease.ended_blocking": lambda e, t: e.lease.ended_blocking(t),
    "Lease.wait": lambda e, t: e.lease.wait(t),
    "Peer.sendable": lambda e, t: e.peer.sendable(1, t),
    "Peer.sendable_blocking": lambda e, t: e.peer.sendable_blocking(1, t),
    "Peer.region": lambda e, t: e.peer.region("none", t),
    "Peer.region_blocking": lambda e, t: e.peer.region_blocking("none", t),
    "Transfer.wait": lambda e, t: e.pending.wait(t),
    "Incoming.wait": lambda e, t: e.incoming.wait(t),
    "Incoming.layer_blocking": lambda e, t: e.incoming.layer_blocking(0, t),
}
# These end something.
ENDING: dict[str, Verb] = {
    "Agent.close": lambda e, t: e.here.close(t),
    "Agent.aclose": lambda e, t: e.here.aclose(t),
    "Lease.revoke": lambda e, t: e.lease.revoke(t),
    "Lease.revoke_blocking": lambda e, t: e.lease.revoke_blocking(t),
    "Region.deregister": lambda e, t: e.region.deregister(t),
    "Region.deregister_blocking": lambda e, t: e.region.deregister_blocking(t),
}
POSITIVE: dict[str, Verb] = {
    "Region.grant": lambda e, t: e.region.grant(e.back, [5], ttl_s=t),
    "Agent(connect_timeout_s)": lambda e, t: Agent("o", AgentOptions(connect_timeout_s=t)).close(),
    "Agent(transfer_timeout_s)": lambda e, t: Agent("o", AgentOptions(transfer_timeout_s=t)).close(),
    "Agent(silent_timeout_s)": lambda e, t: Agent(
        "o", AgentOptions(silent_timeout_s=t, heartbeat_interval_s=1e-3)
    ).close(),
    "Agent(handshake_timeout_s)": lambda e, t: Agent("o", AgentOptions(handshake_timeout_s=t)).close(),
}
COUNTED: dict[str, Verb] = {
    "Agent.write(priority)": lambda e, n: e.here.write(e.source, e.remote, [1], [2], priority=n),
    "Agent.read(priority)": lambda e, n: e.here.read(e.source, e.remote, [1], [2], priority=n),
    "Agent.command_ring": lambda e, n: e.here.command_ring(n),
    "CommandRing.ended": lambda e, n: e.ring.ended(n),
    "CommandRing.ended_blocking": lambda e, n: e.ring.ended_blocking(n, 0),
    "CommandRing.start(pair)": lambda e, n: e.ring.start(e.prepared, n),
    "CommandRing.start(layer)": lambda e, n: e.ring.start(e.prepared, 0, n),
    "CommandRing.start(num_pairs)": lambda e, n: e.ring.start(e.prepared, 0, None, n),
    "Incoming.layer": lambda e, n: e.incoming.layer(n),
    "Incoming.layer_blocking": lambda e, n: e.incoming.layer_blocking(n, 0),
    "Incoming.layer_arrived": lambda e, n: e.incoming.layer_arrived(n),
    "Peer.sendable": lambda e, n: e.peer.sendable(n),
    "Peer.sendable_blocking": lambda e, n: e.peer.sendable_blocking(n),
    "Transfer.mark_ready": lambda e, n: e.pending.mark_ready(n),
    "Trigger.fire": lambda e, n: e.trigger.fire(n),
    "Trigger.at": lambda e, n: e.trigger.at(n),
    "Trigger.by_layer": lambda e, n: e.trigger.by_layer(n),
    "Pool(num_blocks)": lambda e, n: Pool(n, 64),
    "Pool(block_nbytes)": lambda e, n: Pool(1, n),
    "Pool(numa_node)": lambda e, n: Pool(1, 64, numa_node=n),
    "Pool.allocate": lambda e, n: e.pool.allocate(n),
    "Agent(transport_options)": lambda e, n: Agent("o", AgentOptions(transport_options={"tcp.rails": n})),
    "Agent(gpu)": lambda e, n: Agent("o", AgentOptions(gpu=n)),
    "Agent(staging_nbytes)": lambda e, n: Agent("o", AgentOptions(staging_nbytes=n)),
    "Agent(max_transfers_per_peer)": lambda e, n: Agent("o", AgentOptions(max_transfers_per_peer=n)),
    "Agent(eager_nbytes)": lambda e, n: Agent("o", AgentOptions(eager_nbytes=n)),
    "Agent(copy_threads)": lambda e, n: Agent("o", AgentOptions(copy_threads=n)),
    "Agent(spin_us)": lambda e, n: Agent("o", AgentOptions(spin_us=n)),
}


TOKENED: dict[str, Verb] = {
    "Agent.write": lambda e, t: e.here.write(e.source, e.remote, [1], [2], lease=t),
    "Agent.read": lambda e, t: e.here.read(e.source, e.remote, [1], [2], lease=t),
    "CommandRing.prepare_write": lambda e, t: e.ring.prepare_write(e.source, e.remote, [1], [2], lease=t),
    "Region.grant": lambda e, t: e.region.grant(None, [5], token=t),
    "LeaseToken.parse": lambda e, t: LeaseToken.parse(t),
}


NO_NUMBERS: tuple[Any, ...] = (
    3,
    "ab",
    b"ab",
    True,
    1.5,
    [0, 1],
    (0,),
    {0},
    np.arange(2),
    iter([0]),
    object(),
)
NO_TEXTS: tuple[Any, ...] = (5, b"kv", [], ["kv"], {"kv"}, np.zeros(2), object())
NO_BYTES: tuple[Any, ...] = (5, "tag", None, [1], np.zeros(2, np.uint8), object())
NO_OBJECTS: tuple[Any, ...] = (5, "kv", b"kv", [], {}, np.zeros(2), object())
NO_BOOLS: tuple[Any, ...] = (0, 1, "no", [], np.zeros(2), object())


def moved(ends: Ends, verb: str, name: str, value: Any) -> Any:
    """Starts a transfer in which one argument has `value`."""
    post = ends.ring.prepare_write if verb == "prepare_write" else getattr(ends.here, verb)
    usual = {"region": ends.source, "remote_region": ends.remote, "src_blocks": [1], "dst_blocks": [2]}
    return post(**{**usual, name: value})


OF_TRANSFERS: dict[str, tuple[Any, ...]] = {
    "region": (*NO_OBJECTS, None),
    "remote_region": (*NO_OBJECTS, None),
    "layers": NO_NUMBERS,
    "heads": NO_NUMBERS,
    "integrity": NO_BOOLS,
    "lease": NO_OBJECTS,
}
# Arguments whose errors name the argument: the verb, the argument, and values of a wrong kind.
KINDS: dict[str, tuple[Verb, str, tuple[Any, ...]]] = {
    **{
        f"{verb}({name})": (
            lambda e, v, verb=verb, name=name: moved(e, verb, name, v),  # type: ignore[misc]
            name,
            values,
        )
        for verb in ("write", "read", "prepare_write")
        for name, values in OF_TRANSFERS.items()
    },
    "write(tokens)": (lambda e, v: moved(e, "write", "tokens", v), "tokens", NO_NUMBERS),
    "read(tokens)": (lambda e, v: moved(e, "read", "tokens", v), "tokens", NO_NUMBERS),
    "write(hold)": (lambda e, v: moved(e, "write", "hold", v), "hold", NO_BOOLS),
    "prepare_write(notify)": (lambda e, v: moved(e, "prepare_write", "notify", v), "notify", NO_BYTES),
    "expect(tag)": (lambda e, v: e.there.expect(v, [3], e.region), "tag", NO_BYTES),
    "expect(region)": (lambda e, v: e.there.expect(b"kind", [3], v), "region", NO_OBJECTS),
    "expect(layers)": (lambda e, v: e.there.expect(b"kind", [3], e.region, layers=v), "layers", NO_NUMBERS),
    "expect(tokens)": (lambda e, v: e.there.expect(b"kind", [3], e.region, tokens=v), "tokens", NO_NUMBERS),
    "expect(peer)": (lambda e, v: e.there.expect(b"kind", [3], e.region, peer=v), "peer", NO_OBJECTS),
    "register(name)": (lambda e, v: e.here.register(v, np.ones((2, 2), np.uint8)), "name", (*NO_TEXTS, None)),
    "register(layout)": (lambda e, v: e.here.register("kind", np.ones(4), v), "layout", NO_OBJECTS),
    "grant(holder)": (lambda e, v: e.region.grant(v, [5]), "holder", NO_TEXTS),
    "grant(mode)": (lambda e, v: e.region.grant(e.back, [5], v), "mode", (*NO_TEXTS, "append")),
    "grant(renewable)": (lambda e, v: e.region.grant(e.back, [5], renewable=v), "renewable", NO_BOOLS),
    "address_for": (lambda e, v: e.here.address_for(v), "target", (5, None, b"tcp://h", [], object())),
    "connect": (lambda e, v: e.here.connect(v), "target", (5, None, b"tcp://h", [], object())),
    "connect_blocking": (lambda e, v: e.here.connect_blocking(v), "target", (5, None, b"tcp://h", [])),
    "accept": (lambda e, v: e.here.accept(v, 0.01), "name", NO_TEXTS),
    "accept_blocking": (lambda e, v: e.here.accept_blocking(v, 0.01), "name", NO_TEXTS),
    "Peer.region": (lambda e, v: e.peer.region(v, 0.01), "name", (*NO_TEXTS, None)),
    "Peer.region_blocking": (lambda e, v: e.peer.region_blocking(v, 0.01), "name", (*NO_TEXTS, None)),
    "Agent(options)": (lambda e, v: Agent("kind", v), "options", NO_OBJECTS),
    "Agent(directory)": (lambda e, v: Agent("kind", directory=v), "directory", NO_OBJECTS),
    "Agent(listen)": (lambda e, v: Agent("kind", listen=v), "option listen", NO_TEXTS),
    "Group": (lambda e, v: Group(v), "works", (5, None, 1.5, object())),
    "LeaseToken.derive": (lambda e, v: LeaseToken.draw().derive(v), "index", ("a", None, [], -1, 1.0)),
}


def call(verb: Verb, ends: Ends, value: Any) -> Any:
    """What the verb returns; a coroutine has a minute, so that what should be refused and waits is seen."""
    made = verb(ends, value)
    if not inspect.iscoroutine(made):
        return made

    async def run() -> Any:
        return await asyncio.wait_for(made, 60)

    return asyncio.run(run())


@pytest.mark.parametrize("name", [*TIMED, *ENDING, *POSITIVE])
def test_what_is_no_time_is_refused_and_changes_nothing(kept: Ends, name: str) -> None:
    verb = {**TIMED, **ENDING, **POSITIVE}[name]
    before = kept.state()
    for value in NO_TIMES:
        with pytest.raises(UsageError, match=r"(timeout_s|ttl_s) must be seconds, not ") as caught:
            call(verb, kept, value)
        assert caught.value.code == "invalid-argument"
    assert kept.state() == before


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_no_count_is_refused_and_changes_nothing(kept: Ends, name: str) -> None:
    before = kept.state()
    for value in NO_COUNTS:
        with pytest.raises(UsageError) as caught:
            call(COUNTED[name], kept, value)
        assert caught.value.code in ("invalid-argument", "out-of-range")
    assert kept.state() == before


@pytest.mark.parametrize("name", TOKENED)
def test_what_is_no_token_is_refused_and_changes_nothing(kept: Ends, name: str) -> None:
    before = kept.state()
    # A number alone grants no right, and a text must go through LeaseToken.parse.
    for value in (1, 2**62 + 1, 0, True, b"kvxfer-lease-1.4000000000000001", "4000000000000001", kept.lease):
        with pytest.raises(UsageError, match="token") as caught:
            call(TOKENED[name], kept, value)
        assert caught.value.code == "invalid-argument"
    assert kept.state() == before


@pytest.mark.parametrize("name", KINDS)
def test_what_is_of_another_kind_is_refused_by_the_arguments_name(kept: Ends, name: str) -> None:
    verb, argument, values = KINDS[name]
    before = kept.state()
    for value in values:
        with pytest.raises(UsageError, match=f"^{argument} must be ") as caught:
            call(verb, kept, value)
        assert caught.value.code == "invalid-argument"
    assert kept.state() == before


def test_what_is_long_is_shown_in_part(kept: Ends) -> None:
    with pytest.raises(
        UsageError, match=r"^region must be a region .*\.\.\. \[invalid-argument\]$"
    ) as caught:
        moved(kept, "write", "region", list(range(10_000)))
    assert len(str(caught.value)) < 500
    # Cut between characters, wherever their bytes fall.
    for lead in ("", "a", "ab", "abc"):
        with pytest.raises(UsageError, match="not "):
            kept.there.expect(b"long", [3], kept.region, context=[lead + "\N{SNOWMAN}" * 200])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["layers", "heads", "tokens"])
def test_layers_heads_and_tokens_have_no_gaps(kept: Ends, name: str) -> None:
    one = moved(kept, "write", name, range(0, 2, 2))  # one number is no gap
    one.cancel()
    with suppress(TransferError):  # other tests of `kept` begin when it has ended
        one.wait(10)
    for numbers in (range(0, 4, 2), range(0, 1 << 70, 2), range(1, -1, -1)):
        with pytest.raises(UsageError, match=f"^{name} of one transfer must be consecutive"):
            moved(kept, "write", name, numbers)
    for numbers in () if name == "tokens" else (range(0),):
        with pytest.raises(UsageError, match=f"^no {name} were named: leave {name} out for all"):
            moved(kept, "write", name, numbers)


def test_an_expectation_of_no_tokens_is_not_advised_to_wait_for_all(kept: Ends) -> None:
    none: tuple[Any, ...] = (range(2, 2), range(0))
    for tokens in none:
        with pytest.raises(UsageError, match=r"^no tokens were named, so nothing would have to arrive"):
            kept.there.expect(b"none", [3], kept.region, tokens=tokens)


def test_an_argument_that_there_is_not_names_the_verb_of_the_agent(kept: Ends) -> None:
    for verb in ("connect_blocking", "read", "expect", "message_blocking", "limit"):
        with pytest.raises(TypeError, match=rf"^Agent\.{verb}\(\)"):
            getattr(kept.here, verb)(nothing=1)


def test_messages_show_the_first_of_many_names(ends: Ends) -> None:
    for number in range(40):
        ends.there.register(f"region-{number:02}", np.zeros((1, 8), np.uint8))
    ends.peer.region_blocking("region-39")
    shown = "kv, region-00, region-01, region-02, region-03, region-04, region-05, region-06 and 33 more"
    with pytest.raises(TimeoutError, match=shown):
        ends.peer.region_blocking("nothing", 0)
    with pytest.raises(KeyError, match=shown):
        ends.peer.regions["nothing"]


@pytest.mark.parametrize("verb", ["write", "read"])
def test_held_layers_land_as_they_are_released(verb: str) -> None:
    near, far = (
        np.full((3, 2, 4, 2, 1, 8), value, np.float16) for value in ((1, 0) if verb == "write" else (0, 1))
    )
    with Agent("here") as here, Agent("there") as there:
        mine = here.register("kv", near, KVLayout.from_tensor(near, "l2bthd"))
        theirs = there.register("kv", far, KVLayout.from_tensor(far, "l2bthd"))
        remote = here.connect_blocking(there.address).region_blocking("kv")
        there.accept_blocking("here")
        token = theirs.grant(None, blocks=[2], mode="read").token
        arriving: Any  # an Incoming, or the Transfer itself
        if verb == "write":
            landed = far
            arriving = there.expect(b"tag", [2], theirs)
            transfer = here.write(mine, remote, [2], [2], notify=b"tag", hold=True)
        else:
            landed = near
            arriving = transfer = here.read(mine, remote, [2], [2], lease=token, hold=True)
        transfer.mark_ready(1)
        arriving.layer_blocking(0, 30)
        assert (landed[0, :, 2] == 1).all()
        assert (landed[1:] == 0).all()
        transfer.mark_ready(3)
        transfer.wait(30)
        arriving.wait(30)
        assert (landed[:, :, 2] == 1).all()


@pytest.mark.parametrize("name", TIMED)
def test_every_number_is_a_time(kept: Ends, name: str) -> None:
    for value in TIMES:
        try:
            made = call(TIMED[name], kept, value)
        except TimeoutError:
            continue
        except KvxferError as error:
            if re.search("within|in time|more than 0 s", str(error)):
                continue
            raise
        if hasattr(made, "cancel"):
            made.cancel()


@pytest.mark.parametrize("name", [*ENDING, *POSITIVE])
def test_a_long_time_is_for_ever(ends: Ends, name: str) -> None:
    verb = {**ENDING, **POSITIVE}[name]
    for value in LONG_TIMES:
        call(verb, ends, value)
        if name in ENDING:
            call(verb, ends, value)  # once more does nothing
            return


@pytest.mark.parametrize("value", LONG_TIMES)
def test_who_waits_for_ever_is_woken(ends: Ends, value: Any) -> None:
    ends.pending.mark_ready(1)
    ends.pending.wait(value)
    with Agent("other") as other:
        ends.here.connect_blocking(other.address, value).disconnect()
    assert ends.here.accept_blocking("there", value).name == "there"
    ends.here.write(ends.source, ends.remote, [1], [2], notify=b"note", timeout_s=value).wait(value)
    assert ends.there.notification_blocking(value).payload == b"note"
    ends.peer.sendable_blocking(timeout_s=value)
    ends.peer.send(b"message")
    assert ends.there.message_blocking(value).payload == b"message"
    assert ends.lease.wait(value) is ends.lease


def test_none_is_no_time_to_close(ends: Ends) -> None:
    """Its memory is served on as long as the agent is not closed."""
    for close in (ends.there.close, ends.there.aclose):
        with pytest.raises(UsageError, match="timeout_s must be seconds, not None"):
            call(lambda _, t, close=close: close(t), ends, None)  # type: ignore[misc]
    assert not ends.there.closed
    ends.here.write(ends.source, ends.remote, [4], [5]).wait(10)
