"""A directory at a real daemon behaves as every directory, also when the daemon is killed."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvxfer import Agent, AgentOptions
from kvxfer.control import Client, DaemonDirectory, schema
from kvxfer.control.client.daemon_directory import DaemonEntries
from kvxfer.directory import Change, ChangeKind, Directory, Entry
from kvxfer.errors import PeerError, UsageError
from kvxfer.testing import directories
from kvxfer.testing.directories import BOUND_S, entry
from tests.control.serving import Program, program
from tests.waiting import until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with program(tmp_path_factory.mktemp("daemon")) as started:
        yield started


def api(started: Program) -> Path:
    return started.folder / "run/api.sock"


class AtDaemon(directories.DirectorySubject):
    ttl_s = 1.0

    def __init__(self, started: Program, seed: int) -> None:
        self._started = started
        self.seed = seed

    @contextmanager
    def open(self) -> Iterator[Directory]:
        with DaemonDirectory(api(self._started)) as directory:
            for each in directory.list():
                directory.withdraw(each.name, each.incarnation)
            yield directory

    def pass_time(self, duration_s: float) -> None:
        threading.Event().wait(duration_s)


@pytest.mark.parametrize(
    ("field", "name", "options"),
    [
        ("ttl_s", "agent", AgentOptions(directory_ttl_s=1e9)),
        ("name", "two\nlines", AgentOptions()),
        ("address", "agent", AgentOptions(advertise="tcp://[fe80::1%eth0]:7301")),
    ],
)
def test_an_agent_whose_entry_is_not_taken_is_told_why(
    field: str, name: str, options: AgentOptions, daemon: Program
) -> None:
    with DaemonDirectory(api(daemon)) as directory:
        with pytest.raises(UsageError, match=f"the daemon's directory does not take {field}"):
            Agent(name, options, directory=directory)
        assert directory.list() == ()


@pytest.mark.parametrize("check", directories.CHECKS, ids=lambda check: str(check.__name__))
def test_contract(check: directories.Check, daemon: Program, seed: int) -> None:
    check(AtDaemon(daemon, seed))


def test_agents_find_each_other_with_a_token_over_tcp(daemon: Program) -> None:
    with (
        DaemonDirectory(daemon.url, token=daemon.token) as one,
        DaemonDirectory(api(daemon)) as other,
        Agent("prefill", directory=one) as prefill,
        Agent("decode", directory=other) as decode,
    ):
        until(lambda: other.list("prefill") == (prefill.entry,), "it is known")
        assert decode.connect_blocking("prefill").incarnation == prefill.incarnation
    with Client(daemon.url, token=daemon.token) as client:
        assert not [each.name for each in client.list_entries().items if each.name in {"prefill", "decode"}]
        topics = [event.topic for event in client.list_events(topic=["directory"], limit=250).items]
        assert {"directory.added", "directory.removed"} <= set(topics)


@pytest.mark.parametrize("role", ["", "read"])
def test_who_may_not_publish_is_told_so(daemon: Program, role: str) -> None:
    """Without a known token, or with a token of the wrong role."""
    token: str | None = "kvxfer-wrong"
    if role:
        with Client(api(daemon)) as client:
            token = client.create_token(schema.TokenRequest(name=role, role="read")).secret
    with DaemonDirectory(daemon.url, token=token) as directory:
        with pytest.raises(PeerError, match="needs the role transfer" if role else "unauthorized") as refused:
            directory.publish(entry("a"))
        assert refused.value.code == "unreachable"


def test_entries_outlive_a_daemon_that_is_killed(tmp_path: Path) -> None:
    """Agents continue while the daemon is down; entries of ended agents expire; a successor has its name."""
    with program(tmp_path) as first:
        stays, goes = DaemonDirectory(api(first)), DaemonDirectory(api(first))
        stays.publish(entry("stays"))
        goes.publish(entry("goes"))
        stays.publish(entry("old", 1), 3600.0)
        until(lambda: len(stays.list()) == 3, "all are known")
        first.end(signal.SIGKILL)
        until(lambda: stays.away, "it is noticed")
        assert stays.resolve_blocking("goes", 0.0) == entry("goes")
        with pytest.raises(PeerError, match="daemon's directory"):
            stays.publish(entry("late"))
        goes.close()
    with program(tmp_path) as second, stays:
        with Client(api(second)) as client:
            # At once, before any agent has published itself again.
            assert {each.name for each in client.list_entries().items} >= {"goes", "old", "stays"}
            client.publish_entry(_published(entry("old", 2)))
        until(lambda: not stays.away, "it is heard again")
        watch = stays.watch_blocking("goes", BOUND_S)
        assert next(watch) == Change(ChangeKind.ADDED, entry("goes"))
        assert next(watch) == Change(ChangeKind.REMOVED, entry("goes"))
        assert stays.list() == (entry("old", 2), entry("stays"))
        second.end(signal.SIGKILL)
    with program(tmp_path) as third, Client(api(third)) as client:
        assert [each.name for each in client.list_entries().items] == ["old", "stays"]


async def test_a_renewal_cuts_off_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a machine of any speed.
    monkeypatch.setattr("kvxfer.control.client.daemon_directory._ANSWER_S", BOUND_S)
    with program(tmp_path) as started:
        entries = DaemonEntries(api(started))
        started.process.send_signal(signal.SIGSTOP)
        calls = [asyncio.ensure_future(entries.publish(entry(name), None, replace=False)) for name in "ab"]
        await asyncio.sleep(0.1)  # the daemon has them, or they are on their way
        await entries.renew()
        started.process.send_signal(signal.SIGCONT)
        assert all(await asyncio.gather(*calls))
        await entries.close()


def _published(said: Entry) -> schema.EntryPublication:
    return schema.EntryPublication(name=said.name, address=said.address, incarnation=said.incarnation.hex())


def test_a_daemon_that_stops_is_given_up_and_comes_back(tmp_path: Path) -> None:
    with program(tmp_path) as started, DaemonDirectory(api(started)) as directory:
        directory.publish(entry("a"))
        until(lambda: not directory.away, "it is heard")
        started.process.send_signal(signal.SIGSTOP)
        until(lambda: directory.away, "it is noticed")
        assert directory.list() == (entry("a"),)
        started.process.send_signal(signal.SIGCONT)
        until(lambda: not directory.away, "it is heard again")
        directory.publish(entry("b"))
        assert directory.list() == (entry("a"), entry("b"))


def test_a_daemon_may_be_its_own_directory(tmp_path: Path) -> None:
    itself = ("--directory", f"unix:{tmp_path}/run/api.sock", "--pool-gib", "0.01")
    for _ in range(2):  # what the first leaves behind does not disturb the second
        with program(tmp_path, *itself, agent=True) as daemon:
            with Client(api(daemon)) as client:
                found = [entry.name for entry in client.list_entries().items]
            assert found == ["daemon/node-a", "daemon/node-a/memory"]
            assert daemon.end() == 0, daemon.said
    with program(tmp_path) as daemon, Client(api(daemon)) as client:
        assert not client.list_entries().items


def test_a_daemon_whose_directory_is_gone_ends_in_order(daemon: Program, tmp_path: Path) -> None:
    with (
        program(tmp_path / "names") as names,
        program(tmp_path / "node", "--directory", str(api(names)), agent=True) as node,
    ):
        names.end(signal.SIGKILL)
        assert node.end() == 0, node.said
    assert not (tmp_path / "node/state/daemon.sqlite-wal").exists(), "the store was closed"


def test_a_daemons_own_agent_is_found_in_the_directory_of_another(daemon: Program, tmp_path: Path) -> None:
    with DaemonDirectory(api(daemon)) as directory:
        watch = directory.watch_blocking("daemon/node-a", BOUND_S)
        with program(tmp_path, "--directory", str(api(daemon)), agent=True) as other:
            told = next(watch)
            assert told.kind is ChangeKind.ADDED
            with Client(api(other)) as client:
                assert client.get_node().agent == told.entry.incarnation.hex()
                assert client.get_node().address == told.entry.address
            assert other.end() == 0
        assert next(watch) == Change(ChangeKind.REMOVED, told.entry)
