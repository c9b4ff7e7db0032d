"""Commands over a daemon's REST as a user starts them: real processes, real agents."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("typer", reason="kvxfer[cli] is not installed")

import kvxfer
from kvxfer.cli import app
from kvxfer.cli.region_reference import RegionReference
from kvxfer.control import Client, ControlError, schema
from kvxfer.control.handed.hand_over import hand_over, shared_array
from kvxfer.control.transfers.live_rates import LinkRate, LiveRates
from kvxfer.errors import UsageError
from tests.control.serving import Program, program
from tests.waiting import until

BOUND_S = 90.0
SHAPE = (4, 2, 16, 8, 2, 8)  # [layers, keys and values, blocks, tokens, heads, dims]
HOSTILE = "\x1b[2J[red]decode"
COMMANDS = (
    ("agents",),
    ("regions",),
    ("peers",),
    ("transfers",),
    ("transfers", "--open"),
    ("leases",),
    ("pages",),
    ("pages", "--pool"),
    ("tokens",),
    ("drain", "--show"),
    ("settings",),
    ("top", "--count", "1", "--interval-s", "0.1"),
)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str, daemon: str = "", **environment: str) -> Done:
    """Runs a command in this process, where it need not load anew what it uses."""
    if arguments[0] == "top":
        return start(*arguments, daemon=daemon)  # its thread ends with its process
    if daemon:
        environment["KVXFER_DAEMON_URL"] = daemon
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
        for name in [name for name in os.environ if name.startswith("KVXFER_")]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        status = app.run(list(arguments))
    return Done(status, out.getvalue(), error.getvalue())


def start(*arguments: str, daemon: str = "") -> Done:
    """Runs a command in a process of its own, as a user starts it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    done = subprocess.run(
        # -P: use the installed package, whatever the working folder contains.
        [sys.executable, "-P", "-m", "kvxfer", *arguments],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
        env=kept | {"KVXFER_DAEMON_URL": daemon},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def told(*arguments: str, daemon: str) -> list[Any]:
    """Runs a command with --json, which must succeed, and returns what it prints."""
    done = run(*arguments, "--json", daemon=daemon)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def until_told_of(transfer: str, node: Node) -> schema.Transfer:
    """Waits until the node's agent has reported its end of a transfer; each end does so at its own time."""

    def found() -> schema.Transfer | None:
        with suppress(ControlError), Client(node.place) as client:
            return client.get_transfer(transfer)
        return None

    return until(found, f"{node.place} does not know {transfer}")


@dataclass
class Node:
    """A daemon with an agent whose region has 16 blocks, each filled with its number plus an offset."""

    daemon: Program
    agent: kvxfer.Agent
    memory: np.ndarray[Any, Any]

    @property
    def place(self) -> str:
        return f"unix:{self.daemon.folder}/run/api.sock"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Two daemons, each with one agent, which do not know each other."""
    folders = [tmp_path_factory.mktemp("node") for _ in range(2)]
    with program(folders[0]) as one, program(folders[1]) as two:
        may = ("show", "move", "grant", "settings")
        options = [kvxfer.AgentOptions(daemon=str(each / "run"), daemon_may=may) for each in folders]
        with kvxfer.Agent("prefill-0", options[0]) as a, kvxfer.Agent(HOSTILE, options[1]) as b:
            found = [Node(one, a, np.zeros(SHAPE, np.float32)), Node(two, b, np.zeros(SHAPE, np.float32))]
            for node in found:
                node.agent.register(
                    "kv", node.memory, kvxfer.KVLayout.from_tensor(node.memory, axes="l2bthd")
                )
                with Client(node.place) as client:
                    until(lambda: list(client.regions()), "the agent is not attached")
            yield found


@pytest.fixture
def filled(nodes: list[Node]) -> list[Node]:
    for node, first in zip(nodes, (1, -100), strict=True):
        node.memory[:] = (first + np.arange(SHAPE[2]))[None, None, :, None, None, None]
    return nodes


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_list_is_there_for_people_and_for_programs(
    nodes: list[Node], arguments: tuple[str, ...]
) -> None:
    done = run(*arguments, daemon=nodes[0].place)
    assert done.returncode == 0, done.stderr
    assert done.stdout or done.stderr
    told(*arguments, daemon=nodes[0].place)


def test_settings_are_changed_and_what_is_not_named_stays(nodes: list[Node]) -> None:
    at, of_agent = nodes[0].place, ("settings", "--agent", "prefill-0")
    told(*of_agent, "--rate", "decode=1000", "--quota", "red=5", daemon=at)
    (found,) = told(*of_agent, "--least-priority", "decode=3", "--tenant-rate", "red=7", daemon=at)
    peers = {"decode": {"max_bytes_per_s": 1000, "least_priority": 3}}
    assert found["agents"] == {"prefill-0": {"peers": peers, "rails": {}, "refused": {}}}
    assert (found["page_quotas_nbytes"], found["tenant_bytes_per_s"]) == ({"red": 5}, {"red": 7})
    assert "1000 B/s, priority 3" in run("settings", daemon=at).stdout
    for wrong in (("--rail", "shm=off"), ("--agent", "prefill-0"), ("--quota", "red=much")):
        assert run("settings", *wrong, daemon=at).returncode == 2, wrong
    undone = ("--forget", "--quota", "red=none", "--tenant-rate", "red=none")
    (found,) = told(*of_agent, *undone, daemon=at)
    assert not found["agents"] | found["page_quotas_nbytes"] | found["tenant_bytes_per_s"]


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_blocks_move_from_one_daemon_to_another(filled: list[Node], push: bool) -> None:
    src = f"{filled[0].place}#prefill-0/kv:3-5,0"
    dst = f"{filled[1].place}#{filled[1].agent.incarnation.hex()}/kv:7,9,1,2"
    (transfer,) = told("move", src, dst, *(["--push"] if push else []), "--context", "req-1", daemon="")
    assert transfer["state"] == "done"
    moved = filled[1].memory[:, :, [7, 9, 1, 2]]
    assert (moved == filled[0].memory[:, :, [3, 4, 5, 0]]).all()
    assert (filled[1].memory[:, :, 3] == -97).all()
    for node in filled:
        with Client(node.place) as client:
            # The lease was only for this transfer.
            until(lambda: not list(client.leases()), "the lease stays")
    at = filled[0 if push else 1].place
    # Both ends have one id, and each reports its stages to its own daemon.
    assert transfer["source"]["agent_name"] == "prefill-0"
    assert transfer["destination"]["agent_name"] == HOSTILE
    for node in filled:
        assert until_told_of(transfer["id"], node).context == "req-1"
    assert told("transfers", transfer["made_id"], daemon=at)[0]["id"] == transfer["id"]
    shown = run("transfers", transfer["id"], daemon=at)
    assert "begun" in shown.stdout
    assert ": the daemon of its node has its stages" in shown.stdout
    assert "0 us  posted here" in shown.stdout
    assert "\x1b" not in shown.stdout
    listed = run("transfers", "--context", "req-1", daemon=at).stdout
    assert "prefill-0/kv" in listed
    assert "decode/kv" in listed


@pytest.mark.parametrize("push", [(), ("--push",)], ids=["pull", "push"])
@pytest.mark.parametrize(("first", "stop"), [(0, 1), (1, 3), (0, 4)])
def test_only_the_named_layers_move(filled: list[Node], push: tuple[str, ...], first: int, stop: int) -> None:
    src, dst = (f"{node.place}#{node.agent.incarnation.hex()}/kv:2-6" for node in filled)
    expected = filled[1].memory.copy()
    expected[first:stop, :, 2:7] = filled[0].memory[first:stop, :, 2:7]
    (transfer,) = told("move", src, dst, *push, "--layers", f"{first}:{stop}", daemon="")
    assert (transfer["state"], transfer["num_layers"]) == ("done", stop - first)
    assert (filled[1].memory == expected).all()


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_memory_that_was_handed_over_moves_without_an_agent(tmp_path: Path, push: bool) -> None:
    """The smallest cluster: two daemons, each with a program that has memory but no agent."""
    folders = [tmp_path / "a", tmp_path / "b"]
    with (
        program(folders[0], "--node", "node-a", agent=True),
        program(folders[1], "--node", "node-b", agent=True),
    ):
        memory = [shared_array(SHAPE, np.float32, name) for name in ("src", "dst")]
        memory[0][:] = np.arange(SHAPE[2])[None, None, :, None, None, None]
        handed = [
            hand_over(each, kvxfer.KVLayout.from_tensor(each, axes="l2bthd"), name, daemon=folder / "run")
            for each, name, folder in zip(memory, ("src", "dst"), folders, strict=True)
        ]
        try:
            ends = [
                f"unix:{folder}/run/api.sock#/{each.region}"
                for folder, each in zip(folders, handed, strict=True)
            ]
            for folder, each in zip(folders, handed, strict=True):
                with Client(f"unix:{folder}/run/api.sock") as client:
                    until(lambda: [found for found in client.regions() if found.name == each.region])  # noqa: B023
            done = run("move", f"{ends[0]}:4-7", f"{ends[1]}:0-3", *(["--push"] if push else []))
            assert done.returncode == 0, done.stdout + done.stderr
            assert (memory[1][:, :, :4] == memory[0][:, :, 4:8]).all()
            assert not memory[1][:, :, 4:].any()
        finally:
            for each in handed:
                each.close()


def test_a_move_says_what_it_did(filled: list[Node]) -> None:
    src, dst = (f"{node.place}#{node.agent.incarnation.hex()}/kv:0" for node in filled)
    done = start("move", src, dst)
    assert done.returncode == 0, done.stderr
    for words in (
        *("lease to read 1 block of kv of prefill-0", "done", "moved ", "/s"),
        *("posted by", "known as ", " until it ends", "  1 block, 4 layers, "),
        *("  from kv of prefill-0: done", "  to kv of \\x1b[2J[red]decode (began it): done"),
    ):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ("prefill-0", "x/kv", "write [daemon#]agent/region[:blocks]"),
        ("prefill-0/kv:0", "prefill-0/kv:1,2", "name the same number at both ends"),
        ("prefill-0/kv:5-3", "prefill-0/kv:0", "are an empty range"),
        ("prefill-0/none:0", "prefill-0/kv:0", "kvxfer regions lists them"),
        ("prefill-0/kv:99", "prefill-0/kv:0", "99"),
        ("unix:/nowhere.sock#a/b:0", "prefill-0/kv:0", "no daemon answers at unix:/nowhere.sock"),
    ],
)
def test_a_move_that_cannot_be_is_refused_in_one_line(
    nodes: list[Node], src: str, dst: str, words: str
) -> None:
    done = run("move", src, dst, daemon=nodes[0].place)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_agents_call_themselves_does_not_reach_the_terminal(nodes: list[Node]) -> None:
    for command in ("agents", "regions", "top"):
        done = run(command, daemon=nodes[1].place)
        assert "\x1b" not in done.stdout
        assert "\\x1b[2J[red]decode" in done.stdout


@pytest.mark.parametrize("noun", ["regions", "peers", "transfers", "leases"])
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["table", "json"])
def test_an_agent_that_is_not_there_is_named(nodes: list[Node], noun: str, more: tuple[str, ...]) -> None:
    done = run(noun, "--agent", "nobody", *more, daemon=nodes[0].place)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvxfer: no agent 'nobody' is attached: kvxfer agents lists them")


def test_sessions_have_their_numbers_and_an_agent_its_fields_on_lines(filled: list[Node]) -> None:
    src, dst = (f"{node.place}#{node.agent.incarnation.hex()}/kv:0" for node in filled)
    assert run("move", src, dst).returncode == 0
    until(lambda: told("peers", "--agent", "prefill-0", daemon=filled[0].place), "no session is told")
    shown = run("peers", "--agent", "prefill-0", daemon=filled[0].place).stdout.splitlines()
    sessions = [str(row["session"]) for row in told("peers", "--agent", "prefill-0", daemon=filled[0].place)]
    assert shown[0].split()[:2] == ["AGENT", "SESSION"]
    assert [line.split()[1] for line in shown if line.startswith("prefill-0")] == sessions
    shown = run("agents", "prefill-0", daemon=filled[0].place).stdout.splitlines()
    (at,) = (line for line in shown if line.startswith("attached_at_s"))
    assert datetime.fromisoformat(at.partition(" ")[2].strip()).year > 2000
    assert "stats" in shown
    assert any(line.startswith("  transfers_open ") for line in shown)


def test_top_names_peers_and_what_ended_before(filled: list[Node]) -> None:
    src, dst = (f"{node.place}#{node.agent.incarnation.hex()}/kv:0" for node in filled)
    (made,) = told("move", src, dst, "--context", "req-top", "--priority", "3", daemon="")
    assert made["priority"] == 3
    assert len(told("transfers", "--limit", "1", daemon=filled[1].place)) == 1
    for node in filled:
        until_told_of(made["id"], node)
        shown = run("top", "--count", "1", "--interval-s", "0.1", daemon=node.place).stdout
        assert "req-top" in shown
        (found,) = told("top", "--count", "1", "--interval-s", "0.1", daemon=node.place)
        assert found["recent"][0]["id"] == made["id"]
        assert found["names"][node.agent.incarnation.hex()[:16]] == node.agent.name


def test_a_transfer_is_cancelled_by_its_id(nodes: list[Node]) -> None:
    with Client(nodes[0].place) as client:
        # No lease is granted, so it waits.
        made = client.create_transfer(
            schema.TransferRequest(
                agent="prefill-0",
                verb="write",
                region="kv",
                remote_agent=nodes[1].agent.address,
                remote_region="kv",
                src_blocks=[0],
                dst_blocks=[0],
                notify="nobody-expects-it",
                timeout_s=BOUND_S,
            )
        )
        assert "prefill-0/kv" in run("transfers", "--open", daemon=nodes[0].place).stdout
        assert told("transfers", made.id, "--cancel", daemon=nodes[0].place)[0]["found"]
        assert client.get_transfer(made.id, wait_s=30).state == "cancelled"
    done = run("transfers", made.id, "--cancel", daemon=nodes[0].place)
    assert "it had ended" in done.stdout


def test_leases_are_granted_extended_and_revoked(nodes: list[Node]) -> None:
    place = nodes[0].place
    done = run("leases", "grant", "prefill-0/kv:3-5", "--holder", "x", "--ttl-s", "60", daemon=place)
    assert done.returncode == 0, done.stderr
    number = kvxfer.LeaseToken.parse(done.stdout.strip())._number
    lease = done.stderr.split()[-1]
    (row,) = until(lambda: told("leases", daemon=place), "the lease is not told")
    assert (row["id"], row["holder"], row["num_blocks"], row["mode"]) == (lease, "x", 3, "read")
    assert str(number) not in str(row), "what opens it"
    assert f"{number:x}" not in str(row)
    assert "active for 120.00 s" in run("leases", "extend", lease, "--ttl-s", "120", daemon=place).stdout
    assert told("leases", "revoke", lease, daemon=place)[0]["state"] == "revoked"
    until(lambda: not told("leases", daemon=place), "the lease stays")
    for arguments, words in (
        (("revoke", lease), "there is no lease"),
        (("extend", lease, "--ttl-s", "1"), "there is no lease"),
        (("grant", "prefill-0/kv:99"), "99"),
        (("grant", "prefill-0/none"), "kvxfer regions lists them"),
        (("grant", "prefill-0/kv", "--holder", "a", "--session", "1"), "name only one"),
        (("grant", "prefill-0/kv", "--session", "99"), "no session 99"),
        (("--agent", "x", "revoke", lease), "write kvxfer leases revoke --agent"),
    ):
        done = run("leases", *arguments, daemon=place)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), (arguments, done.stderr)
        assert words in done.stderr


def test_pages_are_parked_fetched_pinned_and_dropped(tmp_path: Path) -> None:
    may = ("show", "move", "grant")
    with program(tmp_path, "--pool-gib", "0.03125", agent=True):
        place = f"unix:{tmp_path}/run/api.sock"
        options = kvxfer.AgentOptions(daemon=str(tmp_path / "run"), daemon_may=may)
        with kvxfer.Agent("a", options) as agent, Client(place) as client:
            memory = np.zeros(SHAPE, np.float32)
            memory[:] = np.arange(SHAPE[2])[None, None, :, None, None, None]
            agent.register("kv", memory, kvxfer.KVLayout.from_tensor(memory, axes="l2bthd"))
            until(lambda: list(client.regions("a")), "the agent is not attached")
            of = ("--model", "m", "--tenant", "red", "--revision", "2")
            (parked,) = told("pages", "park", "a/kv:7,9", "x", "y", *of, "--context", "req-1", daemon=place)
            assert [page["state"] for page in parked["pages"]] == ["parked", "parked"]
            peer = client.connect_agent("a", schema.ConnectRequest(remote_agent=client.get_node().address))
            writing = schema.LeaseRequest(agent="a", region="kv", mode="write", holder=peer.session)
            right = ("--lease", client.grant_lease(writing).token, "--notify", "fetched")
            done = run("pages", "fetch", "a/kv:1,2", "y", "x", *of, *right, daemon=place)
            assert done.returncode == 0, done.stderr
            assert f"layout {parked['layout']}, " in done.stdout
            assert (memory[:, :, [1, 2]] == memory[:, :, [9, 7]]).all()
            assert agent.notification_blocking(BOUND_S).payload == b"fetched"
            lease = client.grant_lease(schema.LeaseRequest(agent="a", region="kv", blocks=[3])).token
            told("pages", "park", "a/kv:3", "z", *of, "--lease", lease, "--pin", daemon=place)
            assert [page.pinned for page in client.pages() if page.key == "z"] == [True]
            for verb, states in (("pin", ["done", "done"]), ("drop", ["done", "done"])):
                short = parked["layout"][:12]
                (done_,) = told("pages", verb, "x", "y", *of, "--layout", short, daemon=place)
                assert [page["state"] for page in done_["pages"]] == states, verb
            done = run("pages", "pin", "x", *of, "--layout", parked["layout"], "--undo", daemon=place)
            assert (done.returncode, "missing" in done.stdout) == (1, True), done.stderr
            for arguments, words in (
                (("pin", "x", *of), "not parked for model 'm'"),
                (("park", "a/kv:1", "x", "y", *of), "keys: 2, blocks: 1; name one block for each key"),
                (("park", "a/kv:1", "x y", *of), "keys.0 is 'x y'"),
                (("fetch", "a/kv:1", "x", *of, "--layout", parked["layout"]), "1 of 1 pages are not parked"),
            ):
                done = run("pages", *arguments, daemon=place)
                assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), (arguments, done.stderr)
                assert words in done.stderr


def test_a_node_is_drained_and_taken_back(tmp_path: Path) -> None:
    with program(tmp_path):
        place = f"unix:{tmp_path}/run/api.sock"
        assert told("drain", "--wait", "--deadline-s", "60", daemon=place)[0]["ready"]
        assert "accepts work" in run("drain", "--undo", daemon=place).stdout


def test_tokens_are_made_into_files_and_used_from_them(nodes: list[Node], tmp_path: Path) -> None:
    file, place = tmp_path / "token", nodes[0].place
    done = run("tokens", "--create", "eyes", "--out", str(file), daemon=place)
    assert done.returncode == 0, done.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    url = nodes[0].daemon.url
    wrong = tmp_path / "wrong"
    wrong.write_text(f"kvx_{'0' * 16}_{'x' * 43}")
    assert run("agents", "--token-file", str(file), daemon=url).returncode == 0
    assert run("agents", daemon=url, KVXFER_TOKEN_FILE=str(file)).returncode == 0
    mover = tmp_path / "mover"
    assert (
        run("tokens", "--create", "m", "--role", "transfer", "--out", str(mover), daemon=place).returncode
        == 0
    )
    ends = [f"{node.daemon.url}#{node.agent.incarnation.hex()}/kv:0" for node in nodes]
    admin = str(nodes[1].daemon.folder / "state/admin.token")
    done = run("move", *ends, "--src-token-file", str(mover), "--dst-token-file", admin)
    assert done.returncode == 0, done.stderr
    (row,) = (row for row in told("tokens", daemon=place) if row["name"] == "m")
    told("tokens", "--revoke", row["id"], daemon=place)
    assert "not valid" in run("agents", "--token-file", str(mover), daemon=nodes[0].daemon.url).stderr
    for arguments, words in (
        (("agents",), "--token-file, or KVXFER_TOKEN_FILE"),
        (("drain", "--token-file", str(file)), "needs the role admin"),
        (("agents", "--token-file", "/nowhere"), "cannot be read"),
        (("agents", "--token-file", str(wrong)), f"the token in {wrong} is not valid at http://127.0.0.1:"),
    ):
        done = run(*arguments, daemon=url)
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_there_is_not_written_over(nodes: list[Node], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("mine")
    done = run("tokens", "--create", "eyes", "--out", str(file), daemon=nodes[0].place)
    assert done.returncode == 2
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "daemon", "name", "blocks"),
    [
        ("a/kv:0-2,7", "", "a/kv", (0, 1, 2, 7)),
        ("a/kv", "", "a/kv", None),
        ("http://h:1#/memory/x@n:3", "http://h:1", "/memory/x@n", (3,)),
        ("unix:/run/a.sock#daemon/n/pool:1@n", "unix:/run/a.sock", "daemon/n/pool:1@n", None),
    ],
)
def test_places(text: str, daemon: str, name: str, blocks: tuple[int, ...] | None) -> None:
    assert RegionReference.parse(text) == RegionReference(daemon, name, blocks)


@pytest.mark.parametrize("text", ["kv:0", "a/kv:3-1", "a/kv:0-99999999999"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(UsageError):
        RegionReference.parse(text)


def test_help_is_quick_for_it_loads_nothing_that_it_does_not_need() -> None:
    code = (
        "import sys; sys.argv = ['kvxfer', '--help']\ntry:\n import kvxfer.cli; kvxfer.cli.main()\nfinally:\n"
    )
    code += " print([name for name in ('httpx', 'pydantic', 'fastapi', 'rich.live') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_rates_count_a_transfer_once_whichever_end_tells() -> None:
    one, other = "1" * 32, "2" * 32
    rates = LiveRates(0.0)

    def ended(number: int, agent: str, role: str) -> dict[str, Any]:
        return {"id": f"{one[:16]}-{other[:16]}-{number}", "agent": agent, "role": role, "nbytes": 1000}

    rates.add(ended(1, one, "source"), 10.0)
    rates.add(ended(1, other, "destination"), 10.0)
    rates.add(ended(2, other, "source"), 12.0)
    rates.add(ended(3, other, "expectation"), 12.0)
    assert rates.links(12.0) == [
        LinkRate(one[:16], other[:16], 200.0, 0.2),
        LinkRate(other[:16], one[:16], 200.0, 0.2),
    ]
    assert rates.links(16.0) == [LinkRate(other[:16], one[:16], 200.0, 0.2)]
    assert rates.links(99.0) == []
