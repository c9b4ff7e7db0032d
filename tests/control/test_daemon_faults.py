"""A daemon that hangs, dies, lies or is another user's does not disturb transfers; an idle link sleeps."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions
from kvxfer.daemon_link.frames import FrameKind, frame
from kvxfer.session.records import RECORD_NBYTES, decode
from kvxfer.testing.pair import Pair, connected_pair
from tests.control.daemon_process import DaemonProcess
from tests.control.daemons import Daemon
from tests.control.raw_ends import BOUND_S, RawDaemon
from tests.waiting import until

ROOT = Path(__file__).parents[2]
EVERYTHING = ("show", "drain", "move", "grant", "settings")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvxfer") as made:  # short enough for a socket's path
        yield Path(made)


def attached(folder: Path, **changes: Any) -> AgentOptions:
    return AgentOptions(daemon=str(folder), daemon_may=EVERYTHING, **changes)


class Traffic:
    """Transfers one after the other on a thread until `stop`, which returns their number."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._stopped = threading.Event()
        self._num_done = 0
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                move(self._pair, 20)
                self._num_done += 20
        except BaseException as error:
            self._errors.append(error)

    def goes_on(self) -> None:
        before = self._num_done
        until(lambda: self._num_done > before or self._errors)
        assert not self._errors

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        assert not self._errors
        return self._num_done


def move(pair: Pair, count: int) -> None:
    """Moves a page so many times; each must arrive."""
    source, remote = pair.prefill, pair.prefill.remote
    for _ in range(count):
        source.agent.write(source.region, remote, [1], [2]).wait(BOUND_S)


def link_of(agent: Agent) -> Any:
    assert agent._daemon_link is not None
    return agent._daemon_link._link


# ---- hanging and dying ----------------------------------------------------------------------------


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    """Two agents that attach to whatever answers in the folder, and may write to each other."""
    with connected_pair(attached(folder)) as made:
        made.decode.region.grant(made.decode.peer, mode="write", ttl_s=3600).wait(BOUND_S)
        yield made


def test_a_daemon_that_reads_nothing_is_told_nothing_more(folder: Path, pair: Pair) -> None:
    """Records are dropped and counted, the agent keeps a bounded part, and each transfer arrives."""
    with RawDaemon(folder) as daemon:
        ends = {end.agent: end for end in (daemon.accept(), daemon.accept())}
        while not pair.prefill.agent.stats()["records_dropped"]:
            move(pair, 200)
        connection = link_of(pair.prefill.agent)._connection
        assert 0 < connection._queued_nbytes < 1 << 20
        # Now the daemon reads: first the kept records, then new ones.
        found: list[Any] = []
        while not found or found[-1].context != "the last":
            message = ends["prefill"].hear(records_too=True)
            if message["t"] != "records":
                continue
            if not found:
                source = pair.prefill
                source.agent.write(source.region, source.remote, [1], [2], context="the last").wait(BOUND_S)
            found += decode(message["records"])
        done = [record for record in found if record.role == "source"]
        assert {record.outcome for record in done} == {"done"}
        told = [record.transfer for record in done]
        assert told == sorted(set(told)), "each once, in order"


def test_a_daemon_that_is_stopped_changes_nothing(folder: Path, pair: Pair) -> None:
    def is_told_of_transfers() -> bool:
        move(pair, 1)
        return bool(daemon.told()["prefill"]["records"])

    with DaemonProcess(folder) as daemon:
        until(lambda: set(daemon.told()) == {"prefill", "decode"})
        # An agent keeps records only after it has read its welcome, which may be later.
        until(is_told_of_transfers)
        num_before = pair.prefill.agent.stats()["transfers_done"]
        daemon.stop()
        move(pair, 3000)
        daemon.go_on()
        num = pair.prefill.agent.stats()["transfers_done"] - num_before
        until(lambda: daemon.told()["prefill"]["records"] + daemon.told()["prefill"]["dropped"] >= num)
        assert daemon.told()["decode"]["regions"] == 1


def test_a_daemon_that_is_killed_again_and_again_is_told_all_anew(folder: Path, pair: Pair) -> None:
    traffic = Traffic(pair)
    for _ in range(4):
        with DaemonProcess(folder) as daemon:
            until(lambda: all_told(daemon, {"regions": 1, "peers": 1, "draining": False}))
            until(lambda: all(told["records"] for told in daemon.told().values()))
            traffic.goes_on()
        traffic.goes_on()
    assert traffic.stop()


def all_told(daemon: DaemonProcess, expected: dict[str, Any]) -> bool:
    told = daemon.told()
    return set(told) == {"prefill", "decode"} and all(
        expected.items() <= each.items() for each in told.values()
    )


def test_draining_outlives_the_daemon_that_asked(folder: Path) -> None:
    with Daemon(folder) as daemon, Agent("here", attached(folder)) as agent:
        daemon.agent("here")
        daemon.call("here", "drain", deadline_s=60)
        daemon.stop()
        assert agent.draining is not None
        daemon.start()
        until(lambda: daemon.agent("here").draining)


def test_records_are_not_made_for_a_daemon_that_stays_away(
    folder: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvxfer.daemon_link import link

    monkeypatch.setattr(link, "_RECORDS_WANTED_S", 0.0)
    with Daemon(folder) as daemon:
        daemon.agent("prefill")
        until(lambda: link_of(pair.prefill.agent)._records_fd >= 0)
        daemon.stop()
        until(lambda: link_of(pair.prefill.agent)._records_fd < 0)
        move(pair, 10)
        daemon.start()
        daemon.agent("prefill")  # with its state, so that it makes records again
        move(pair, 1)
        until(lambda: daemon.records_of("prefill"))
        assert len(daemon.records_of("prefill")) == 1


# ---- lying ----------------------------------------------------------------------------------------

CALL = {"t": "call", "id": 1, "verb": "show.state", "args": {}, "timeout_s": 1.0}
LIES: dict[str, Any] = {
    "a length of 4 GiB": b"\xff\xff\xff\xff\0",
    "a kind that there is not": b"\1\0\0\0\7x",
    "records": frame(FrameKind.RECORDS, bytes(RECORD_NBYTES)),
    "no JSON": frame(FrameKind.JSON, b"{"),
    "an unknown message": {"t": "order"},
    "a second welcome": {"t": "welcome"},
    "a call of no number": {**CALL, "id": "1"},
    "a call without arguments": {**CALL, "args": [1]},
    "a call of no time": {**CALL, "timeout_s": "1"},
    "a call for ever": frame(FrameKind.JSON, b'{"t":"call","id":1,"verb":"x","args":{},"timeout_s":1e999}'),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_daemon_that_lies_is_left_and_called_again(
    lie: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RawDaemon(folder) as daemon, Agent("here", attached(folder)):
        end = daemon.accept()
        end.say(LIES[lie])
        if lie == "a call for ever":
            assert end.hear_reply()["code"] == "unsupported"
            return
        assert end.is_left()
        again = daemon.accept()
        again.say(CALL)
        assert "answer" in again.hear_reply()
        warned = [line for line in caplog.records if line.levelno == logging.WARNING]
        assert len(warned) == 1, "once"


def test_a_call_before_the_welcome_is_a_lie(folder: Path) -> None:
    with RawDaemon(folder) as daemon, Agent("here", attached(folder)):
        end = daemon.accept(is_welcome=False)
        end.say(CALL)
        assert end.is_left()


def test_a_daemon_that_asks_and_does_not_read_is_left(folder: Path) -> None:
    with RawDaemon(folder) as daemon, Agent("here", attached(folder)) as agent:
        agent.register("kv", np.zeros((8, 256), np.uint8))
        end = daemon.accept()

        def ask() -> None:
            try:
                while True:
                    end.say(CALL)
            except OSError:
                pass

        asking = threading.Thread(target=ask)
        asking.start()
        daemon.accept()
        asking.join(BOUND_S)
        assert not asking.is_alive()


def test_why_an_agent_was_refused_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RawDaemon(folder) as daemon, Agent("here", attached(folder)):
        end = daemon.accept(is_welcome=False)
        end.say({"t": "refused", "words": "not today"})
        assert end.is_left()
        daemon.accept()
    assert "the daemon refuses it: not today" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
def test_a_daemon_of_another_user_is_not_obeyed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = (
        "import os, socket, sys; os.setuid(65534)\n"
        "listening = socket.socket(socket.AF_UNIX); listening.bind(sys.argv[1]); listening.listen()\n"
        "print('ready', flush=True)\n"
        "while True: print(len(listening.accept()[0].recv(1)), flush=True)"
    )
    folder.chmod(0o777)
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(folder / "agents.sock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with Agent("here", attached(folder)):
            assert other.stdout.readline() == "0\n", "it is told nothing"
            until(lambda: "only its own user's or root's is obeyed" in caplog.text)
    finally:
        other.kill()
        other.communicate()


# ---- fork, many, idle -----------------------------------------------------------------------------


def test_a_forked_child_holds_no_end_of_the_link(folder: Path) -> None:
    """The daemon notices the parent's end although its child lives on."""
    with Daemon(folder) as daemon:
        agent = Agent("parent", attached(folder))
        daemon.agent("parent")
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a process that has threads
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(writing)
                agent.close()
                code = 0 if os.read(reading, 1) == b"" else 2
            finally:
                os._exit(code)
        os.close(reading)
        try:
            agent.close()
            until(lambda: daemon.find("parent") is None)
        finally:
            os.close(writing)
            _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_200_agents_are_attached_at_once_and_again(folder: Path) -> None:
    agents = [
        Agent(f"agent-{number}", attached(folder, listen="", transports=("loopback",)))
        for number in range(200)
    ]
    try:
        for _ in range(2):
            with DaemonProcess(folder) as daemon:
                until(lambda: len(daemon.told()) == 200)
    finally:
        for agent in agents:
            agent.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvxfer-daemon"]


def switches(thread: threading.Thread) -> int:
    """How often a thread was switched out, which is how often it ran."""
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def rested(count: Callable[[], int]) -> int:
    """Returns by how much a count grows in 2 idle seconds; the least of several tries."""
    least = 1 << 30
    for _ in range(5):
        before = count()
        time.sleep(2.0)  # idle time; not a wait for a condition
        least = min(least, count() - before)
        if least == 0:
            break
    return least


def test_an_idle_link_sleeps(folder: Path, pair: Pair) -> None:
    with DaemonProcess(folder) as daemon:
        until(lambda: all_told(daemon, {"regions": 1, "peers": 1}))
        move(pair, 10)
        until(lambda: all(told["records"] == 10 for told in daemon.told().values()))
        threads = [link_of(each.agent)._thread for each in (pair.prefill, pair.decode)]
        assert rested(lambda: sum(map(switches, threads))) == 0
