"""The hosts that a request makes the daemon or an agent dial: checked where they are dialled, by address."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from kvxfer import Agent, AgentOptions
from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.control import Client, schema
from kvxfer.control.client.daemon_directory import DaemonDirectory
from kvxfer.errors import PeerError, TransferError
from tests.control.serving import Served, program, serving
from tests.waiting import until_on_loop


@contextmanager
def silent_host() -> Iterator[tuple[str, socket.socket]]:
    """A listener on loopback that never answers; yields its address and the socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", listener


def was_called(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@asynccontextmanager
async def node_of_directory(folder: Path, allow: tuple[str, ...] | None) -> AsyncIterator[tuple[Served, str]]:
    """A daemon with a pool and an agent ``here``, and the place of the daemon that is their directory."""
    with program(folder / "names") as names:
        at = f"unix:{names.folder}/run/api.sock"
        async with serving(
            folder / "node", own_agent=True, node="node-b", directory=at, pool_gib=0.001, allow=allow
        ) as node:
            options = AgentOptions(daemon=str(folder / "node/run"), daemon_may=("show", "move", "grant"))
            with DaemonDirectory(at) as directory:
                async with Agent("here", options, directory=directory):
                    agents = node.daemon.agents
                    await until_on_loop(lambda: any(each.name == "here" for each in agents.all()))
                    yield node, at


def publish(at: str, name: str, address: str) -> None:
    with Client(at) as client:
        life = secrets.token_hex(16)
        client.publish_entry(schema.EntryPublication(name=name, address=address, incarnation=life))


async def park(client: httpx.AsyncClient, agent: str) -> httpx.Response:
    asked = {"agent": agent, "region": "kv", "blocks": [0], "keys": ["k"], "model": "m"}
    return await client.post("/v1/pages/park", json=asked)


async def test_a_name_of_the_directory_leads_to_no_host_that_may_not_be_dialled(tmp_path: Path) -> None:
    async with node_of_directory(tmp_path, ("10.0.0.0/8",)) as (node, at), node.unix() as client:
        with silent_host() as (address, listener):
            publish(at, "trap", address)
            publish(at, "trap-by-name", address.replace("127.0.0.1", "localhost"))
            for name in ("trap", "trap-by-name"):
                answers = [await park(client, name)]
                answers.append(await client.post("/v1/agents/here/peers", json={"remote_agent": name}))
                for answer in answers:
                    assert (answer.status_code, answer.json()["code"]) == (403, "not-permitted"), answer.text
                    assert "127.0.0.1" in answer.json()["detail"] or "localhost" in answer.json()["detail"]
            assert not was_called(listener)


async def test_a_name_of_the_directory_leads_to_a_host_that_may_be_dialled(tmp_path: Path) -> None:
    async with node_of_directory(tmp_path, ("127.0.0.0/8",)) as (node, at), node.unix() as client:
        async with Agent("far") as far:
            publish(at, "far", far.address.replace("127.0.0.1", "localhost"))
            answer = await client.post("/v1/agents/here/peers", json={"remote_agent": "far"})
            # The entry has another incarnation than the agent, which answered: it was dialled.
            assert answer.json()["code"] == "peer-restarted", answer.text
        async with Agent("near", directory=DaemonDirectory(at)):
            answer = await client.post("/v1/agents/here/peers", json={"remote_agent": "near"})
            assert answer.json()["name"] == "near", answer.text


async def test_names_that_do_not_answer_delay_no_other_name(tmp_path: Path) -> None:
    """More dead names than one host may have dials."""
    async with node_of_directory(tmp_path, None) as (node, at), node.unix() as client:
        with silent_host() as (address, _):
            for number in range(20):
                publish(at, f"dead-{number}", address)
            dead = [asyncio.create_task(park(client, f"dead-{number}")) for number in range(20)]
            dials = node.daemon.own._dials  # type: ignore[union-attr]
            await until_on_loop(lambda: sum(dials._of_host.values()) >= 16)
            async with Agent("alive", listen="tcp://127.0.0.2:0", directory=DaemonDirectory(at)):
                answer = await park(client, "alive")
            assert answer.json()["code"] == "unknown-region", answer.text  # it was reached
            for task in dead:
                task.cancel()
            await asyncio.gather(*dead, return_exceptions=True)


async def test_dead_names_keep_an_attached_agent_from_no_other_call(tmp_path: Path) -> None:
    """More dead names than an agent makes dials of one host, or has threads for calls that end leases."""
    async with node_of_directory(tmp_path, None) as (node, at), node.unix() as client:
        connect = "/v1/agents/here/peers"
        with silent_host() as (address, _):
            for number in range(20):
                publish(at, f"dead-{number}", address)
            dead = [
                asyncio.create_task(client.post(connect, json={"remote_agent": f"dead-{number}"}))
                for number in range(20)
            ]
            await asyncio.wait(dead, return_when=asyncio.FIRST_COMPLETED)
            async with Agent("alive", listen="tcp://127.0.0.2:0", directory=DaemonDirectory(at)) as alive:
                answer = await client.post(connect, json={"remote_agent": "alive"})
                assert answer.json().get("id") == alive.incarnation.hex(), answer.text
            here = next(each.incarnation for each in node.daemon.agents.all() if each.name == "here")
            answer = await client.delete(f"/v1/leases/{here}-none")
            assert answer.json()["code"] == "not-found", answer.text
            for task in dead:
                task.cancel()
            await asyncio.gather(*dead, return_exceptions=True)


@pytest.mark.parametrize(
    ("hosts", "host", "is_allowed"),
    [
        (None, "10.1.2.3", True),
        (None, "100.64.0.1", True),
        (None, "fd12::1", True),
        (None, "169.254.169.254", False),
        (None, "100.100.100.200", False),
        (None, "fd00:ec2::254", False),
        (None, "fd00:0ec2:0::254", False),
        (None, "fd20:ce::254", False),
        (None, "fd00:c1::a9fe:a9fe", False),
        (None, "fd00:42::42", False),
        (None, "::ffff:a9fe:a9fe", False),
        (None, "::ffff:6464:64c8", False),
        (None, "::ffff:a01:203", True),
        (("0.0.0.0/0",), "169.254.169.254", False),
        (("fd00::/8",), "fd00:ec2::254", False),
        (("::/0",), "::ffff:a9fe:a9fe", False),
        (("169.254.169.254",), "169.254.169.254", True),
        (("FD00:EC2:0::254",), "fd00:ec2::254", True),
        (("*",), "169.254.169.254", True),
    ],
)
def test_metadata_services_are_dialled_only_if_they_are_named(
    hosts: tuple[str, ...] | None, host: str, is_allowed: bool
) -> None:
    assert AllowedHosts(hosts).allow(host) is is_allowed


def test_what_a_host_name_stands_for_is_checked_and_dialled() -> None:
    assert AllowedHosts(("127.0.0.0/8", "::1/128")).place_of("tcp://localhost:1") in (
        "tcp://127.0.0.1:1",
        "tcp://[::1]:1",
    )
    assert AllowedHosts(("localhost",)).place_of("tcp://localhost:1") == "tcp://localhost:1"
    # Spellings that only a resolver understands.
    for host in ("2852039166", "0xa9fea9fe", "169.254.43518"):
        with pytest.raises(TransferError, match=r"169\.254\.169\.254") as caught:
            AllowedHosts(None).place_of(f"tcp://{host}:80")
        assert caught.value.code == "not-permitted"
    with pytest.raises(PeerError, match="invalid"):
        AllowedHosts(None).place_of("tcp://no-such-host.invalid:1")
