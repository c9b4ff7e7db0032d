"""The agent's end of the link: what it reports, and what it does for the daemon within its options."""

from __future__ import annotations

import errno
import gc
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, LeaseToken, Peer, Region
from kvxfer.control.agents.agent_errors import AgentGone, CallRefused
from kvxfer.daemon_link import link
from kvxfer.daemon_link.agent_state import AgentState
from kvxfer.errors import KvxferError
from tests.certificates import Authority
from tests.control.daemons import Daemon
from tests.control.raw_ends import BOUND_S
from tests.waiting import until

EVERYTHING = ("show", "drain", "move", "grant", "settings")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as made:
        yield made


def options(at: Daemon, **changes: Any) -> AgentOptions:
    return AgentOptions(
        **{"daemon": str(at.folder), "daemon_may": EVERYTHING, "secret": "this is not to be told", **changes}
    )


class Pair:
    """Two attached agents, each with a region ``"kv"`` of 8 blocks, and no session yet."""

    def __init__(self, daemon: Daemon, **changes: Any) -> None:
        self.agents = [Agent(name, options(daemon, **changes)) for name in ("here", "there")]
        self.here, self.there = self.agents
        self.memory = [np.zeros((8, 256), np.uint8) for _ in self.agents]
        self.regions: list[Region] = [
            agent.register("kv", memory) for agent, memory in zip(self.agents, self.memory, strict=True)
        ]

    def connect(self) -> Peer:
        return self.here.connect_blocking(self.there.address)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.close()


@pytest.fixture
def pair(daemon: Daemon) -> Iterator[Pair]:
    with Pair(daemon) as made:
        yield made


def link_thread(agent: Agent) -> threading.Thread | None:
    return None if agent._daemon_link is None else agent._daemon_link._link._thread


# ---- what is told ---------------------------------------------------------------------------------


def test_an_agent_tells_who_it_is_and_no_secret(daemon: Daemon, pair: Pair) -> None:
    told = daemon.agent("here")
    assert (told.incarnation, told.address) == (pair.here.incarnation.hex(), pair.here.address)
    assert (told.pid, told.uid, told.may) == (os.getpid(), os.geteuid(), EVERYTHING)
    assert told.options["transfer_timeout_s"] == 30.0
    assert "this is not to be told" not in repr(told)
    assert abs(told.clock_offset_ns - (time.time_ns() - time.monotonic_ns())) < 10**9


def test_an_agent_with_certificates_tells_their_paths(daemon: Daemon, tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("kvxfer://acme/here", allow=("acme/*/*",))
    with Agent("here", options(daemon, secret=None, tls=tls)):
        told = daemon.agent("here").options["tls"]
    assert (told["certificate"], told["allow"]) == (str(tls.certificate), ["acme/*/*"])
    assert "PRIVATE KEY" not in repr(told)


OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "an infinite time": ({"transfer_timeout_s": math.inf}, "inf"),
    "numpy's integer": ({"copy_threads": np.int64(2)}, 2),
    "numpy's number": ({"connect_timeout_s": np.float32(2.5)}, 2.5),
    "a list": ({"daemon_may": ["show", "drain"]}, ["show", "drain"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_its_options_are_an_agent_attaches(daemon: Daemon, name: str) -> None:
    given, told = OPTIONS[name]
    with Agent("here", options(daemon, **given)):
        assert {option: daemon.agent("here").options[option] for option in given} == {next(iter(given)): told}


@pytest.mark.parametrize("part", ["hello", "changed", "dup"])
def test_after_any_error_of_its_own_the_link_says_so_and_calls_again(
    daemon: Daemon, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Injected: the greeting is no JSON, a report raises, and the system has no descriptor."""
    left = [1, 2]

    def once(real: Any) -> Any:
        def failing(*arguments: Any) -> Any:
            if left:
                left.pop()
                if part == "hello":
                    return {"t": "hello", "options": object()}
                raise (
                    OSError(errno.EMFILE, "no descriptor is left") if part == "dup" else KeyError("injected")
                )
            return real(*arguments)

        return failing

    owner = {"hello": link, "changed": AgentState, "dup": os}[part]
    monkeypatch.setattr(owner, part, once(getattr(owner, part)))
    with Agent("here", options(daemon)) as agent:
        until(lambda: not left and daemon.find("here") is not None)
        agent.register("kv", np.zeros((8, 256), np.uint8))
        until(lambda: daemon.agent("here").num_regions == 1)
    odd = [line for line in caplog.records if "is tried again" in line.getMessage()]
    assert len(odd) == (part != "dup"), "once for each reason"


def test_of_very_many_regions_the_first_are_told(daemon: Daemon) -> None:
    with Agent("many", options(daemon)) as agent:
        memory = np.zeros((1, 16), np.uint8)
        for number in range(70):
            agent.register(f"region-{number}", memory)
        told = daemon.agent("many")
        until(lambda: told.num_regions == 70)
        assert [row["name"] for row in told.regions] == [f"region-{number}" for number in range(64)]


def test_a_bearers_lease_is_told_without_what_opens_it(daemon: Daemon, pair: Pair) -> None:
    number = str(pair.regions[0].grant(None).token).split(".")[1]
    told = daemon.agent("here")
    until(lambda: told.leases)
    assert number not in repr(told.leases)
    assert str(int(number, 16)) not in repr(told.leases)
    assert daemon.call("here", "grant.revoke", lease=told.leases[0]["lease"]) == {"found": True}
    until(lambda: not told.leases)


def test_what_ends_with_the_agent_is_told(daemon: Daemon) -> None:
    with Pair(daemon) as pair:
        daemon.agent("here")
        pair.here.expect(b"never", [1])
        pair.here.close()
        until(lambda: any(record.code == "closed" for _, record in daemon.records))
        until(lambda: daemon.find("here") is None)


def test_without_a_daemon_there_is_no_thread(monkeypatch: pytest.MonkeyPatch, daemon: Daemon) -> None:
    monkeypatch.setenv("KVXFER_DAEMON_DIR", str(daemon.folder))
    with Agent("found") as agent:
        assert link_thread(agent) is not None
        daemon.agent("found")
    with Agent("never", AgentOptions(daemon="")) as agent:
        assert agent._daemon_link is None
    monkeypatch.setenv("KVXFER_DAEMON_DIR", str(daemon.folder / "none"))
    with Agent("alone") as agent:
        assert agent._daemon_link is None
    assert not [thread for thread in threading.enumerate() if thread.name == "kvxfer-daemon"]


# ---- what is done ---------------------------------------------------------------------------------


def test_the_logs_level_is_set(daemon: Daemon, pair: Pair) -> None:
    log = logging.getLogger("kvxfer")
    before = log.level
    try:
        daemon.call("here", "settings.set", log_level="error")
        assert log.level == logging.ERROR
    finally:
        log.setLevel(before)


def test_settings_that_cannot_all_be_made_change_nothing(daemon: Daemon, pair: Pair) -> None:
    pair.connect()
    limits = {"there": {"max_bytes_per_s": 1000}}
    daemon.call("here", "settings.set", peers=limits, rails={"unix": False})
    with pytest.raises(CallRefused, match="'there'") as caught:
        daemon.call("here", "settings.set", peers={"there": None}, rails={"loopback": False})
    assert caught.value.code == "unsupported"
    assert pair.here.limits["there"].max_bytes_per_s == 1000


# ---- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("may", [(), ("show", "drain"), ("move",)])
def test_an_agent_does_what_its_owner_lets_it(may: tuple[str, ...], daemon: Daemon) -> None:
    verbs = {"show.state", "show.transfers", "drain", "move.read", "move.write", "move.cancel"}
    verbs |= {"move.connect", "grant.grant", "grant.revoke", "settings.set"}
    with Agent("here", options(daemon, daemon_may=may)):
        daemon.agent("here")
        for verb in sorted(verbs):
            if verb.partition(".")[0] not in may:
                with pytest.raises(CallRefused, match="its owner names that in") as caught:
                    daemon.call("here", verb, deadline_s=1)
                assert caught.value.code == "not-permitted"


MOVED: dict[str, Any] = {
    "region": "kv",
    "remote_agent": "there",
    "remote_region": "kv",
    "src_blocks": [1],
    "dst_blocks": [1],
}


@pytest.mark.parametrize(
    ("verb", "args", "code"),
    [
        ("show.secrets", {}, "unsupported"),
        ("show.state", {"more": 1}, "invalid-argument"),
        ("show.transfers", {"most": 10**9}, "invalid-argument"),
        ("drain", {}, "invalid-argument"),
        ("drain", {"deadline_s": -1}, "invalid-argument"),
        ("move.write", {}, "invalid-argument"),
        ("move.write", MOVED | {"after": 1}, "invalid-argument"),
        ("move.write", MOVED | {"region": "none"}, "unknown-region"),
        ("move.write", MOVED | {"remote_region": "none"}, "unknown-region"),
        ("move.write", MOVED | {"remote_agent": "who"}, "invalid-argument"),
        ("move.write", MOVED | {"remote_agent": "f" * 32}, "unreachable"),
        ("move.write", MOVED | {"remote_agent": "tcp://127.0.0.1:1"}, "unreachable"),
        ("move.write", MOVED | {"src_blocks": [1.5]}, "invalid-argument"),
        ("move.write", MOVED | {"src_blocks": [1, 2]}, "length-mismatch"),
        ("move.write", MOVED | {"lease": "not a token"}, "invalid-argument"),
        ("move.write", MOVED | {"layers": [0, 2]}, "invalid-argument"),
        ("move.write", MOVED | {"priority": 256}, "invalid-argument"),
        ("move.connect", {"remote_agent": "who"}, "invalid-argument"),
        ("move.connect", {"remote_agent": "tcp://127.0.0.1:1"}, "unreachable"),
        ("move.cancel", {"handle": "1"}, "invalid-argument"),
        ("grant.grant", {"region": "kv", "holder": None, "mode": "write"}, "invalid-argument"),
        ("grant.grant", {"region": "kv", "holder": None, "session": 99}, "peer-lost"),
        ("grant.grant", {"region": "kv", "holder": None, "blocks": [8]}, "out-of-range"),
        ("settings.set", {"log_level": "loud"}, "invalid-argument"),
        ("settings.set", {"rate": 1}, "invalid-argument"),
        ("settings.set", {"peers": {"there": {"rate": 1}}}, "invalid-argument"),
        ("settings.set", {"peers": {"there": {"max_bytes_per_s": 0}}}, "invalid-argument"),
        ("settings.set", {"rails": {"shm": "off"}}, "invalid-argument"),
        ("settings.set", {"rails": {"smoke": False}}, "invalid-argument"),
    ],
)
def test_what_does_not_fit_is_refused(
    verb: str, args: dict[str, Any], code: str, daemon: Daemon, pair: Pair
) -> None:
    pair.connect()
    with pytest.raises(CallRefused) as caught:
        daemon.call("here", verb, **args)
    assert (caught.value.code, caught.value.words != "") == (code, True)
    assert daemon.call("here", "move.cancel", handle=10**6) == {"found": False}
    assert daemon.call("here", "grant.revoke", lease="99") == {"found": False}


# ---- ends -----------------------------------------------------------------------------------------


def test_a_call_under_way_ends_with_the_agent(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dial that hangs delays neither the link nor the agent's close."""
    entered, release = threading.Event(), threading.Event()

    def hang(self: Agent, target: str, timeout_s: float | None = None) -> Peer:
        entered.set()
        release.wait(BOUND_S)
        raise KvxferError("too late", code="unreachable")

    monkeypatch.setattr(Agent, "connect_blocking", hang)
    with Pair(daemon) as pair:
        daemon.agent("here")
        ended: list[BaseException] = []

        def ask() -> None:
            try:
                daemon.call("here", "move.write", **MOVED)
            except BaseException as error:
                ended.append(error)

        asking = [threading.Thread(target=ask) for _ in range(9)]
        for each in asking:
            each.start()
        assert entered.wait(BOUND_S)
        until(lambda: ended)  # of 9 concurrent dials of one agent the last is refused
        assert isinstance(ended[0], CallRefused)
        assert ended[0].code == "exhausted"
        daemon.call("here", "drain", deadline_s=1)
        pair.here.close()
        for each in asking:
            each.join(BOUND_S)
        assert [type(error) for error in ended[1:]] == 8 * [AgentGone]
        release.set()
        until(lambda: not [each for each in threading.enumerate() if each.name == "kvxfer-call"])


def test_an_agent_that_is_dropped_is_gone(daemon: Daemon) -> None:
    agent = Agent("dropped", options(daemon))
    daemon.agent("dropped")
    thread = link_thread(agent)
    assert thread is not None
    del agent
    # The link holds a reference to the agent while it reports, so the garbage collector may need a second
    # look.
    until(lambda: bool(gc.collect() + 1) and not thread.is_alive())
    until(lambda: daemon.find("dropped") is None)


def test_closing_leaves_no_descriptor_and_no_thread(daemon: Daemon) -> None:
    with Pair(daemon):
        pass  # made only once
    gc.collect()
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    threads = set(threading.enumerate())
    for _ in range(5):
        with Pair(daemon) as pair:
            daemon.agent("here")
            pair.connect()
    until(lambda: not daemon.links.agents)  # type: ignore[union-attr]
    del pair
    gc.collect()
    # The daemon, which is in this process, closes its ends in its loop's next round.
    until(lambda: sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before)
    assert not [
        thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("kvxfer-")
    ]


def test_a_token_of_a_granted_lease_can_be_read(daemon: Daemon, pair: Pair) -> None:
    granted = daemon.call("here", "grant.grant", region="kv", holder="who", ttl_s=60, mode="read")
    assert LeaseToken.parse(granted["token"]).agent == "here"
    assert daemon.call("here", "grant.extend", lease=granted["lease"], ttl_s=10) == {"found": True}
    [row] = daemon.call("here", "show.state")["leases"]
    assert row["seconds_left"] > 30, "it is made no shorter"
    assert daemon.call("here", "grant.extend", lease=granted["lease"], ttl_s=3600) == {"found": True}
    [row] = daemon.call("here", "show.state")["leases"]
    assert 3000 < row["seconds_left"] <= 3600
    assert daemon.call("here", "grant.revoke", lease=granted["lease"]) == {"found": True}
    assert daemon.call("here", "grant.extend", lease=granted["lease"], ttl_s=60) == {"found": False}


def test_an_extended_lease_outlives_its_first_time(daemon: Daemon, pair: Pair) -> None:
    short = daemon.call("here", "grant.grant", region="kv", holder="who", ttl_s=0.2)
    long = daemon.call("here", "grant.grant", region="kv", holder="who", ttl_s=0.2)
    daemon.call("here", "grant.extend", lease=long["lease"], ttl_s=3600)
    until(lambda: len(daemon.call("here", "show.state")["leases"]) == 1)
    assert daemon.call("here", "show.state")["leases"][0]["lease"] == long["lease"] != short["lease"]


def test_the_folder_may_be_a_socket(daemon: Daemon) -> None:
    with Agent("by-socket", options(daemon, daemon=str(Path(daemon.folder) / "agents.sock"))):
        daemon.agent("by-socket")
