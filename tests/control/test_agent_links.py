"""The daemon's end of the link: agents come and go; a slow or malicious one ends alone."""

from __future__ import annotations

import asyncio
import json
import math
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.control.agents import agent_link as tested
from kvxfer.control.agents.agent_errors import AgentGone, CallRefused
from kvxfer.control.agents.agent_links import AgentLinks
from kvxfer.daemon_link.frames import FrameKind, frame, json_frame
from kvxfer.session.records import RECORD_NBYTES, encode
from tests.control.daemons import Daemon
from tests.control.raw_ends import BOUND_S, HELLO, RawAgent
from tests.control.records import record
from tests.waiting import until

INCARNATION = HELLO["incarnation"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as made:
        yield made


def region(**changes: Any) -> dict[str, Any]:
    return {
        "id": 1,
        "name": "kv",
        "kind": "pool",
        "num_blocks": 4,
        "nbytes": 64,
        "layout": {"a": 1},
        "notes": [],
        **changes,
    }


def test_an_agent_is_known_from_its_hello_to_its_going(daemon: Daemon) -> None:
    with RawAgent(daemon.folder) as agent:
        agent.greet(options={"gpu": None}, may=["show", "drain"])
        attached = daemon.agent("raw")
        assert (attached.pid, attached.uid) == (os.getpid(), os.geteuid()), "as the kernel tells them"
        assert (attached.may, attached.options) == (("show", "drain"), {"gpu": None})
        agent.say(
            {"t": "state", "regions": [region(of_a_later_version=1)], "num_regions": 1, "draining": True}
        )
        agent.say({"t": "state", "stats": {"records_dropped": 7}, "monotonic_ns": 5, "unix_ns": 12})
        until(lambda: attached.records_dropped == 7)
        assert attached.regions == [region()]
        assert (attached.draining, attached.num_regions, attached.clock_offset_ns) == (True, 1, 7)
    until(lambda: daemon.find("raw") is None)
    assert daemon.changes == [
        ("raw", frozenset({"attached"})),
        ("raw", frozenset({"regions", "draining"})),
        ("raw", frozenset({"stats"})),
        ("raw", frozenset({"gone"})),
    ]


LIES: dict[str, Any] = {
    "a length of 4 GiB": b"\xff\xff\xff\xff\0",
    "a kind that there is not": b"\1\0\0\0\7x",
    "no JSON": frame(FrameKind.JSON, b"\xff\xfe"),
    "a frame without a message": frame(FrameKind.JSON, b"{}"),
    "a number that is none": frame(
        FrameKind.JSON, json.dumps({"t": "state", "regions": [region(layout={"a": math.nan})]}).encode()
    ),
    "a second hello": HELLO,
    "an unknown message": {"t": "order"},
    "half a record": frame(FrameKind.RECORDS, bytes(RECORD_NBYTES + 1)),
    "a record of no role": frame(FrameKind.RECORDS, b"\xff" * RECORD_NBYTES),
    "regions that are none": {"t": "state", "regions": [[]]},
    "a region without a name": {"t": "state", "regions": [{"id": 1}]},
    "a number that is a text": {"t": "state", "regions": [region(nbytes="64")]},
    "a counter that is a fraction": {"t": "state", "stats": {"transfers_open": 0.5}},
    "a counter of 81 bits": {"t": "state", "stats": {"records_dropped": 1 << 80}},
    "a number of 1,000 digits": {"t": "state", "num_peers": 10**1000},
    "half a character": frame(FrameKind.JSON, b'{"t":"state","regions":[' + b'{"name":"\\ud800"}]}'),
    "two thousand regions": {"t": "state", "regions": [region()] * 2000},
    "a clock that is none": {"t": "state", "unix_ns": "now", "monotonic_ns": 1},
}


@pytest.mark.parametrize("lie", LIES)
def test_one_that_lies_is_left_alone(lie: str, daemon: Daemon) -> None:
    with RawAgent(daemon.folder) as honest, RawAgent(daemon.folder) as liar:
        honest.greet(name="raw-honest", incarnation="1" * 32)
        liar.greet()
        liar.say(LIES[lie])
        assert liar.is_left()
        honest.say({"t": "state", "draining": True})
        until(lambda: daemon.agent("raw-honest").draining)
        assert daemon.find("raw") is None
        with RawAgent(daemon.folder) as again:
            again.greet()


@pytest.mark.parametrize(
    "hello",
    [
        {"v": 2},
        {"name": ""},
        {"name": "x" * 129},
        {"incarnation": "0"},
        {"may": "show"},
        {"options": {"x": "x" * 20_000}},
        {"t": "state"},
    ],
)
def test_a_hello_that_is_none_is_not_welcome(hello: dict[str, Any], daemon: Daemon) -> None:
    with RawAgent(daemon.folder) as agent:
        agent.say({**HELLO, **hello})
        assert agent.is_left()
    assert not daemon.changes


def test_one_that_calls_anew_replaces_its_old_connection(daemon: Daemon) -> None:
    with RawAgent(daemon.folder) as old, RawAgent(daemon.folder) as new:
        old.greet()
        new.greet(host="new")
        assert old.is_left()
        assert daemon.agent("raw").host == "new"
        until(lambda: len(daemon.changes) == 3)
        assert [what for _, what in daemon.changes] == [{"attached"}, {"gone"}, {"attached"}]


def test_more_than_256_are_refused_in_words(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "MOST_AGENTS", 3)
    agents = [RawAgent(daemon.folder) for _ in range(4)]
    for number, agent in enumerate(agents[:3]):
        agent.greet(incarnation=f"{number:032x}")
    agents[3].say(HELLO)
    assert agents[3].hear() == {"t": "refused", "words": "3 agents are attached"}
    agents[0].socket.close()
    until(lambda: len(daemon.links.agents) == 2)  # type: ignore[union-attr]
    with RawAgent(daemon.folder) as fifth:
        fifth.greet(incarnation="f" * 32)
    for agent in agents:
        agent.socket.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of other users")
def test_another_users_agent_is_refused_unless_it_is_named() -> None:
    script = (
        "import os, sys, pathlib\n"
        "from tests.control.raw_ends import HELLO, RawAgent\n"
        "os.setuid(65534)\n"
        "agent = RawAgent(pathlib.Path(sys.argv[1])); agent.say(HELLO); print(agent.hear()['t'])"
    )

    def other(folder: Path) -> str:
        command = [sys.executable, "-c", script, str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.splitlines()[-1]

    with Daemon() as daemon:
        daemon.folder.parent.chmod(0o755)
        assert "Permission denied" in other(daemon.folder)
        # Even if the folder's permissions admit it.
        daemon.folder.chmod(0o755)
        (daemon.folder / "agents.sock").chmod(0o666)
        assert other(daemon.folder) == "refused"
    with Daemon(allowed_uids={65534}) as daemon:
        daemon.folder.parent.chmod(0o755)
        assert other(daemon.folder) == "welcome"


# ---- floods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flood",
    [frame(FrameKind.RECORDS, bytes(256 * RECORD_NBYTES)), json_frame({"t": "state", "num_peers": 1})],
    ids=["records", "messages"],
)
def test_a_flood_is_read_as_fast_as_is_fair_and_others_are_served(flood: bytes, daemon: Daemon) -> None:
    """Most of a flood waits in the sender's socket, and not in the daemon."""
    with RawAgent(daemon.folder) as flooder, RawAgent(daemon.folder) as other:
        flooder.greet()
        other.greet(name="raw-other", incarnation="1" * 32)
        stop = threading.Event()

        def pour() -> None:
            try:
                while not stop.is_set():
                    flooder.say(flood * 100)
            except OSError:
                pass

        pouring = threading.Thread(target=pour)
        pouring.start()
        try:
            link = daemon.links._link(INCARNATION)  # type: ignore[union-attr]
            until(lambda: link._credit < 0, "it is never held back")
            for number in range(50):
                other.say({"t": "state", "num_peers": number})
                until(lambda: daemon.agent("raw-other").num_peers == number)  # noqa: B023
            assert len(link._reader._left) <= 1 << 20
        finally:
            stop.set()
            flooder.socket.shutdown(2)
            pouring.join()


# ---- calls ----------------------------------------------------------------------------------------


def asked(daemon: Daemon, timeout_s: float = BOUND_S) -> Any:
    """Begins a call; returns the future of its end."""
    assert daemon.links is not None
    call = daemon.links.call(INCARNATION, "show.state", {"a": 1}, timeout_s)
    return asyncio.run_coroutine_threadsafe(call, daemon._loop)


def test_a_call_is_answered_or_refused(daemon: Daemon) -> None:
    with RawAgent(daemon.folder) as agent:
        agent.greet()
        first, second = asked(daemon), asked(daemon)
        calls = [agent.hear(), agent.hear()]
        assert [(call["verb"], call["args"]) for call in calls] == 2 * [("show.state", {"a": 1})]
        # Replies may come in any order; a reply without a waiting call is ignored.
        agent.say({"t": "reply", "id": 77, "answer": {}})
        agent.say({"t": "reply", "id": calls[1]["id"], "code": "not-permitted", "words": "no"})
        agent.say({"t": "reply", "id": calls[0]["id"], "answer": {"x": 1}})
        assert first.result(BOUND_S) == {"x": 1}
        with pytest.raises(CallRefused, match="no") as caught:
            second.result(BOUND_S)
        assert caught.value.code == "not-permitted"


def test_a_call_ends_with_its_time_or_its_agent(daemon: Daemon) -> None:
    with pytest.raises(AgentGone):
        asked(daemon).result(BOUND_S)
    with RawAgent(daemon.folder) as agent:
        agent.greet()
        with pytest.raises(TimeoutError):
            asked(daemon, 0.01).result(BOUND_S)
        late = agent.hear()
        waiting = asked(daemon)
        agent.hear()
        agent.say({"t": "reply", "id": late["id"], "answer": {}})
    with pytest.raises(AgentGone):
        waiting.result(BOUND_S)


@pytest.mark.parametrize("reply", [{}, {"code": 3, "words": "x"}, {"answer": []}])
def test_an_answer_that_is_none_ends_the_connection(reply: dict[str, Any], daemon: Daemon) -> None:
    with RawAgent(daemon.folder) as agent:
        agent.greet()
        waiting = asked(daemon)
        agent.say({"t": "reply", "id": agent.hear()["id"], **reply})
        assert agent.is_left()
        with pytest.raises(AgentGone):
            waiting.result(BOUND_S)


def test_open_transfers_that_are_none_end_the_connection(daemon: Daemon) -> None:
    assert daemon.links is not None
    with RawAgent(daemon.folder) as agent:
        agent.greet()
        waiting = asyncio.run_coroutine_threadsafe(daemon.links.open_transfers(INCARNATION), daemon._loop)
        agent.say({"t": "reply", "id": agent.hear()["id"], "answer": {"records": "AAAA"}})
        assert agent.is_left()
        with pytest.raises(AgentGone):
            waiting.result(BOUND_S)


def test_an_agent_that_reads_nothing_is_asked_no_more(daemon: Daemon) -> None:
    assert daemon.links is not None
    links = daemon.links

    async def fill() -> list[BaseException]:
        args = {"x": "x" * 900_000}
        calls = (links.call(INCARNATION, "show.state", args, 0.5) for _ in range(80))
        ends = await asyncio.gather(*calls, return_exceptions=True)
        return [each for each in ends if isinstance(each, BaseException)]

    with RawAgent(daemon.folder) as agent:
        agent.greet()
        ends = daemon.do(fill())
        assert {type(each) for each in ends} == {TimeoutError, CallRefused}
        assert {each.code for each in ends if isinstance(each, CallRefused)} == {"exhausted"}
        with pytest.raises(CallRefused, match="longer than"):
            daemon.do(links.call(INCARNATION, "show.state", {"x": "x" * (1 << 20)}, 1.0))


def test_a_callback_that_raises_ends_the_connection_that_made_it(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    assert daemon.links is not None

    def fail(*_: object) -> None:
        raise RuntimeError("of the callback")

    with RawAgent(daemon.folder) as agent:
        agent.greet()
        daemon.links._links.on_records = fail
        agent.say(frame(FrameKind.RECORDS, bytes(RECORD_NBYTES)))
        assert agent.is_left()
    assert "of the callback" in caplog.text


# ---- the folder -----------------------------------------------------------------------------------


def test_the_folder_and_the_socket_are_the_users_alone(daemon: Daemon) -> None:
    assert stat.S_IMODE(daemon.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((daemon.folder / "agents.sock").stat().st_mode) == 0o600


def test_one_daemon_has_a_folder(daemon: Daemon) -> None:
    with Daemon(daemon.folder.parent / "other"), pytest.raises(BlockingIOError), Daemon(daemon.folder):
        pass
    daemon.stop()
    assert not (daemon.folder / "agents.sock").exists()
    with Daemon(daemon.folder):
        pass


def test_a_socket_that_a_daemon_left_when_it_was_killed_is_taken(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, pathlib, sys\nfrom kvxfer.control.agents.agent_links import AgentLinks\n"
        "async def main():\n"
        "    kept = AgentLinks(pathlib.Path(sys.argv[1]), on_records=print, on_change=print)\n"
        "    await kept.start(); os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())"
    )
    with Daemon() as daemon:
        folder = daemon.folder.parent / "left"
        subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, check=False)
        assert (folder / "agents.sock").exists()
        with Daemon(folder):
            pass


@pytest.mark.parametrize(
    ("spoil", "error"),
    [("a file", NotADirectoryError), ("a link", NotADirectoryError), ("of others", PermissionError)],
)
def test_a_folder_of_others_is_refused(spoil: str, error: type[OSError], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if spoil == "a file":
        folder.write_text("")
    elif spoil == "a link":
        (tmp_path / "own").mkdir()
        folder.symlink_to(tmp_path / "own")
    else:
        folder.mkdir()
        folder.chmod(0o777)

    async def start() -> None:
        await AgentLinks(folder, on_records=print, on_change=print).start()

    with pytest.raises(error):
        asyncio.run(start())


def test_many_records_are_taken_in_pieces_and_in_order(daemon: Daemon) -> None:
    """A frame of the greatest length, and the frames after it."""
    with RawAgent(daemon.folder) as agent:
        agent.greet()
        told = [record(transfer=number) for number in range(3000)]
        agent.say(frame(FrameKind.RECORDS, encode(told[:2700])))
        agent.say(frame(FrameKind.RECORDS, encode(told[2700:])))
        agent.say({"t": "state", "num_peers": 7})
        until(lambda: daemon.agent("raw").num_peers == 7)
        assert daemon.records_of("raw") == told
