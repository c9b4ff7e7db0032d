"""Each field of each request of REST: sent to a daemon, and its effect looked at where it is, at an agent.

A test sends each field of its model with two values (one may be none) and compares what becomes of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kvxfer import Agent, KVLayout, LeaseToken, TransferError
from kvxfer.control import DaemonDirectory, layout_digest, schema
from kvxfer.control.schema.base import RequestModel
from tests.control.serving import BOUND_S, DIGEST
from tests.control.test_node_of_agents import Node, node_of_agents

# Reached before the bound, and not in the time of a request.
SHORT_S = 0.3
LONG_S = 600.0
NUM_LAYERS, NUM_BLOCKS, WIDTH = 2, 16, 64


class Sender:
    """Sends requests, and remembers the values of each field."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._values: dict[tuple[str, str], set[str]] = {}

    async def send(self, verb: str, path: str, model: type[RequestModel], body: dict[str, Any]) -> Any:
        """Returns the answer's JSON, or the problem's code."""
        self.note(model, body)
        answer: httpx.Response = await self.node.client.request(verb, f"/v1/{path}", json=body)
        return answer.json() if answer.is_success else answer.json()["code"]

    def note(self, model: type[RequestModel], body: dict[str, Any]) -> None:
        for name in model.model_fields:
            self._values.setdefault((model.__name__, name), set()).add(repr(body.get(name)))

    def assert_each_field_had_two_values(self, *models: type[RequestModel]) -> None:
        wanted = {(model.__name__, name) for model in models for name in model.model_fields}
        once = [field for field in sorted(wanted) if len(self._values.get(field, ())) < 2]
        assert not once


TESTED: dict[type[RequestModel], str] = {}
Test = Callable[[Sender], Awaitable[None]]


def fields_of(*models: type[RequestModel]) -> Callable[[Test], Test]:
    """Makes a test of one that sends all fields of some models."""

    def wrap(test: Test) -> Test:
        TESTED.update(dict.fromkeys(models, test.__name__))

        async def run(sender: Sender) -> None:
            await test(sender)
            sender.assert_each_field_had_two_values(*models)

        run.__name__ = test.__name__
        return run

    return wrap


def test_every_request_has_a_test() -> None:
    found = {
        each for each in vars(schema).values() if isinstance(each, type) and issubclass(each, RequestModel)
    }
    # Bases of others, and what answers have, too.
    assert found - {RequestModel} <= TESTED.keys() | {schema.Entry, schema.Salt}


@pytest.fixture
async def sender(tmp_path: Path, seed: int) -> AsyncIterator[Sender]:
    """Two agents with the regions ``kv`` and ``layers`` of random bytes, at a daemon with a pool."""
    rng = np.random.default_rng(seed)
    async with node_of_agents(
        tmp_path, own_agent=True, pool_gib=1 / 64, pages_dir=tmp_path / "kv", pages_gib=0.25
    ) as node:
        for agent in (node.here, node.there):
            node.memory[agent.name][:] = rng.integers(1, 256, node.memory[agent.name].shape, np.uint8)
            array = rng.integers(1, 256, (NUM_LAYERS, NUM_BLOCKS, WIDTH), np.uint8)
            node.memory[f"{agent.name}/layers"] = array
            agent.register("layers", array, KVLayout.from_tensor(array, "lbd"))
        names = {"kv", "layers"}
        await node.until(
            "/v1/regions", lambda told: sum(each["name"] in names for each in told["items"]) == 4
        )
        yield Sender(node)


async def ended(node: Node, made: Any) -> Any:
    """Returns the record of a transfer that was made, once it has ended at the end that began it."""
    assert isinstance(made, dict), made
    return await node.get(f"/v1/transfers/{made['id']}", wait_s=30)


@fields_of(schema.TransferRequest)
async def test_transfers(sender: Sender) -> None:
    node = sender.node
    base = {
        "agent": "here",
        "region": "kv",
        "remote_agent": "there",
        "remote_region": "kv",
        "src_blocks": [1, 2],
        "dst_blocks": [3, 4],
        "timeout_s": BOUND_S,
    }

    async def move(**changes: Any) -> Any:
        return await ended(
            node, await sender.send("POST", "transfers", schema.TransferRequest, base | changes)
        )

    tokens = {name: (await node.lease(name))["token"] for name in ("here", "there")}
    base["lease"] = tokens["there"]
    here, there = node.memory["here"], node.memory["there"]
    assert (await move(notify="read", context="two"))["state"] == "done"
    np.testing.assert_array_equal(here[3:5], there[1:3])
    note = await node.there.notification(BOUND_S)
    assert (note.payload, note.context) == (b"read", "two")
    assert (
        await move(agent="there", remote_agent="here", src_blocks=[5], dst_blocks=[6], lease=tokens["here"])
    )["state"] == "done"
    np.testing.assert_array_equal(there[6], here[5])

    # To write: the tag that the other end expects; the context arrives there.
    incoming = node.there.expect(b"tag", [9], node.regions["there"])
    written = await move(
        verb="write", lease=None, src_blocks=[8], dst_blocks=[9], notify="tag", context="one", tenant="red"
    )
    assert (written["state"], written["context"], written["tenant"]) == ("done", "one", "red")
    await asyncio.wait_for(incoming, BOUND_S)
    np.testing.assert_array_equal(there[9], here[8])
    assert incoming.context == "one"

    # Only the named layers, of the named region.
    layers = (await node.lease("there", region="layers"))["token"]
    before = node.memory["here/layers"].copy()
    layered = await move(region="layers", remote_region="layers", layers=[1, 2], lease=layers, priority=7)
    assert (layered["state"], layered["num_layers"], layered["priority"]) == ("done", 1, 7)
    np.testing.assert_array_equal(node.memory["here/layers"][0], before[0])
    np.testing.assert_array_equal(node.memory["here/layers"][1, 3:5], node.memory["there/layers"][1, 1:3])

    # A lease that has ended counts no more, whichever others hold; and nobody expects this tag.
    lease = await node.lease("there", blocks=[1, 2])
    assert (await move(lease=lease["token"]))["state"] == "done"
    await node.client.delete(f"/v1/leases/{lease['id']}")
    assert (await move(lease=lease["token"]))["code"] == "lease-ended"
    late = await move(verb="write", lease=None, notify="nobody", timeout_s=SHORT_S)
    assert late["code"] in ("deadline", "not-permitted"), "by the end that looks first"


@fields_of(schema.LeaseRequest, schema.LeaseExtension)
async def test_leases(sender: Sender) -> None:
    node = sender.node
    peer = await node.here.connect(node.there.address)
    back = await node.there.accept("here", BOUND_S)

    async def lease(**changes: Any) -> Any:
        base = {"agent": "there", "region": "kv", "ttl_s": LONG_S}
        return await sender.send("POST", "leases", schema.LeaseRequest, base | changes)

    async def read(granted: Any, block: int, region: str = "kv") -> str:
        """Returns how `here` reads a block under a lease; compares the bytes."""
        name = {"kv": "", "layers": "/layers"}[region]
        token = LeaseToken.parse(granted["token"])
        try:
            await node.here.read(
                node.here.regions[region], await peer.region(region), [block], [0], lease=token
            )
        except TransferError as error:
            return error.code
        np.testing.assert_array_equal(
            node.memory[f"here{name}"][..., 0, :], node.memory[f"there{name}"][..., block, :]
        )
        return "done"

    assert await read(await lease(), 15) == "done"
    assert await read(await lease(region="layers"), 15, "layers") == "done"
    some = await lease(blocks=[1, 2])
    assert [await read(some, 2), await read(some, 3)] == ["done", "not-permitted"]
    assert await read(await lease(holder="somebody-else"), 1) == "not-permitted"
    assert await read(await lease(holder="here/*"), 1) == "not-permitted"
    assert await read(await lease(holder="here"), 1) == "done"

    # The right to write is of a session.
    wrong = await lease(mode="write", holder=back._id + 1000)
    assert isinstance(wrong, str)
    await lease(agent="there", mode="write", holder=back._id, blocks=[7])
    write = node.here.write(node.regions["here"], peer.regions["kv"], [6], [7], timeout_s=BOUND_S)
    await write
    np.testing.assert_array_equal(node.memory["there"][7], node.memory["here"][6])

    # One of `here` that ends by itself, and one that was extended.
    brief = await lease(agent="here", ttl_s=SHORT_S)
    kept = await lease(agent="here", ttl_s=BOUND_S)
    for ttl_s in (LONG_S, LONG_S + 1):
        path = f"leases/{kept['id']}/extend"
        assert isinstance(await sender.send("POST", path, schema.LeaseExtension, {"ttl_s": ttl_s}), dict)

    def is_one_left(told: Any) -> bool:  # agents report a change later
        left_s = {each["id"]: each["seconds_left"] for each in told["items"]}
        return brief["id"] not in left_s and LONG_S - BOUND_S < left_s.get(kept["id"], 0) <= LONG_S + 1

    await node.until("/v1/leases", is_one_left, agent="here")


@fields_of(schema.ConnectRequest)
async def test_connections(sender: Sender) -> None:
    for remote in (sender.node.there.address, "there"):
        body = {"remote_agent": remote}
        made = await sender.send("POST", "agents/here/peers", schema.ConnectRequest, body)
        (peer,) = sender.node.here.peers
        assert (made["session"], made["id"]) == (peer._id, sender.node.there.incarnation.hex())


@fields_of(schema.EntryPublication, schema.EntryKept, schema.EntriesKept)
async def test_the_directory(sender: Sender) -> None:
    node = sender.node

    async def publish(**changes: Any) -> Any:
        base = {"name": "far", "address": node.there.address, "incarnation": node.there.incarnation.hex()}
        return await sender.send("PUT", "directory", schema.EntryPublication, base | changes)

    async def kept(*entries: dict[str, str]) -> Any:
        for entry in entries:
            sender.note(schema.EntryKept, entry)
        return await sender.send("PUT", "directory/keep", schema.EntriesKept, {"entries": [*entries]})

    assert (await publish(metadata={"role": "decode"}))["published"]
    other = "f" * 32
    assert not (await publish(incarnation=other, replace=False))["published"]

    def look_up() -> None:
        with DaemonDirectory(f"unix:{node.served.socket}") as directory:
            assert dict(directory.resolve_blocking("far", BOUND_S).metadata) == {"role": "decode"}
            with Agent("finder", directory=directory) as finder:
                assert finder.connect_blocking("far", BOUND_S).incarnation == node.there.incarnation

    await asyncio.to_thread(look_up)
    assert (await publish(name="brief", address="", ttl_s=SHORT_S))["published"]
    own = {"name": "far", "incarnation": node.there.incarnation.hex()}
    assert (await kept(own))["lost"] == []
    not_there = own | {"incarnation": other}, {"name": "none", "incarnation": other}
    assert (await kept(*not_there))["lost"] == ["far", "none"]
    await node.until("/v1/directory", lambda told: "brief" not in {each["name"] for each in told["items"]})


@fields_of(schema.SettingsChange, schema.AgentSettingsChange, schema.PeerLimitChange)
async def test_settings(sender: Sender) -> None:
    node = sender.node

    async def change(**changes: Any) -> Any:
        for agent in (changes.get("agents") or {}).values():
            sender.note(schema.AgentSettingsChange, agent or {})
            for limit in ((agent or {}).get("peers") or {}).values():
                sender.note(schema.PeerLimitChange, limit or {})
        told = await sender.send("PATCH", "settings", schema.SettingsChange, changes)
        assert isinstance(told, dict), told
        return told

    # Daemon and agents log in this process.
    log = logging.getLogger("kvxfer")
    before = log.level
    try:
        await change(log_level="warning")
        assert log.level == logging.WARNING
        await change(agents_log_level={"here": "error"})
        assert log.level == logging.ERROR
    finally:
        log.setLevel(before)

    await change(agents={"here": {"peers": {"there": {"max_bytes_per_s": 4096, "least_priority": 3}}}})
    limit = node.here.limits["there"]
    assert (limit.max_bytes_per_s, limit.least_priority) == (4096, 3)
    await change(agents={"here": {"peers": {"there": {"max_bytes_per_s": 8192}}, "rails": {"unix": "off"}}})
    limit = node.here.limits["there"]
    assert (limit.max_bytes_per_s, limit.least_priority) == (8192, 0)
    assert list(node.here.rails_off) == ["unix"]
    await change(agents={"here": None})
    assert not node.here.limits
    assert not list(node.here.rails_off)

    block = {"model": "m", "tenant": "red", "agent": "here", "region": "kv"}

    async def park(key: str) -> str:
        answer = await node.client.post("/v1/pages/park", json={**block, "keys": [key], "blocks": [1]})
        return "parked" if answer.is_success else str(answer.json()["code"])

    await change(page_quotas_nbytes={"red": 1})
    assert await park("a") == "exhausted"
    await change(page_quotas_nbytes={"red": None}, tenant_bytes_per_s={"red": 1})
    assert [await park("a"), await park("b")] == ["parked", "rate-limited"]


@fields_of(schema.DrainRequest)
async def test_draining(sender: Sender) -> None:
    for deadline_s in (60.0, 600.0):
        began = time.monotonic()
        await sender.send("PUT", "drain", schema.DrainRequest, {"deadline_s": deadline_s})
        until = sender.node.here.draining
        assert until is not None
        assert began < until - deadline_s + 1 <= time.monotonic() + 1


@fields_of(schema.TokenRequest)
async def test_tokens(sender: Sender) -> None:
    node = sender.node

    async def make(**changes: Any) -> Any:
        return await sender.send("POST", "tokens", schema.TokenRequest, {"name": "t"} | changes)

    async def may(made: Any, verb: str, path: str, **asked: Any) -> int:
        async with node.served.tcp(made["secret"]) as client:
            return (await client.request(verb, f"/v1/{path}", **asked)).status_code

    reader, admin = await make(name="reader"), await make(role="admin", tenants=None)
    assert [await may(each, "GET", "settings") for each in (reader, admin)] == [200, 200]
    assert [await may(each, "PUT", "drain", json={}) for each in (reader, admin)] == [403, 200]
    await node.client.delete("/v1/drain")
    red = await make(role="transfer", tenants=["red"])
    asked = {"model": "m", "keys": ["k"], "layout": DIGEST}
    pins = [await may(red, "POST", "pages/pin", json=asked | {"tenant": who}) for who in ("red", "blue")]
    assert pins == [200, 403]
    async with node.served.tcp(red["secret"]) as client:
        assert (await client.get("/v1/whoami")).json()["name"] == "t"
    brief = await make(ttl_s=SHORT_S)
    async with asyncio.timeout(BOUND_S):
        while await may(brief, "GET", "node") != 401:  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.05)
    of_certificate = await make(certificate="URI:spiffe://router")
    assert (of_certificate["secret"], of_certificate["certificate"]) == (None, "URI:spiffe://router")


@fields_of(schema.ParkRequest, schema.PagesRequest, schema.PageLeaseRequest, schema.FetchRequest)
async def test_pages(sender: Sender) -> None:
    node = sender.node
    here, there = node.memory["here"], node.memory["there"]
    digest = layout_digest(node.regions["here"].layout)

    async def park(**changes: Any) -> Any:
        base = {"model": "m", "keys": ["k"], "agent": "here", "region": "kv", "blocks": [5]}
        told = await sender.send(
            "POST", "pages/park", schema.ParkRequest, base | {"timeout_s": BOUND_S} | changes
        )
        return told if isinstance(told, str) else [page["state"] for page in told["pages"]]

    async def which(verb: str, **changes: Any) -> Any:
        base = {"model": "m", "keys": ["k"], "layout": digest}
        told = await sender.send("POST", f"pages/{verb}", schema.PagesRequest, base | changes)
        return [page["state"] for page in told["pages"]]

    async def fetch(**changes: Any) -> Any:
        base = {
            "model": "m",
            "keys": ["k"],
            "layout": digest,
            "agent": "there",
            "region": "kv",
            "blocks": [6],
        }
        asked = base | {"notify": "tag", "timeout_s": BOUND_S} | changes
        told = await sender.send("POST", "pages/fetch", schema.FetchRequest, asked)
        return told if isinstance(told, str) else [page["state"] for page in told["pages"]]

    async def lease(**changes: Any) -> Any:
        base = {"model": "m", "keys": ["k"], "layout": digest}
        return await sender.send("POST", "pages/lease", schema.PageLeaseRequest, base | changes)

    # What is parked is what its key, with each part of its salt, names: the bytes of that block then.
    salts: list[dict[str, str]] = [{}, {"tenant": "red"}, {"model": "n"}, {"revision": "2"}]
    blocks = range(5, 9)
    for salt_of, block in zip(salts, blocks, strict=True):
        assert await park(blocks=[block], context=f"park {block}", **salt_of) == ["parked"]
    await node.until("/v1/transfers", lambda told: told["items"], context="park 8")
    for target, (salt_of, block) in enumerate(zip(salts, blocks, strict=True)):
        tag = f"tag {target}"
        expected = node.there.expect(tag.encode(), [target], node.regions["there"])
        assert await fetch(blocks=[target], notify=tag, context=f"fetch {target}", **salt_of) == ["done"]
        await asyncio.wait_for(expected, BOUND_S)
        assert expected.context == f"fetch {target}"
        np.testing.assert_array_equal(there[target], here[block])

    # Another agent, region and key; a lease of its owner's; and one that its owner has ended.
    token = await node.lease("there", region="layers", blocks=[3])
    other = {"keys": ["l"], "agent": "there", "region": "layers", "blocks": [3]}
    layers = layout_digest(node.there.regions["layers"].layout)
    assert await park(**other, lease=token["token"], pin=True) == ["parked"]
    await node.client.delete(f"/v1/leases/{token['id']}")
    assert await park(**other | {"keys": ["late"]}, lease=token["token"]) == "lease-ended"
    assert await park(keys=["k", "late"], blocks=[5, 6], timeout_s=30.0) == ["present", "parked"]
    assert await park(keys=["safe"], blocks=[7], acknowledge="durable") == ["parked"]
    (in_files,) = (each for each in (await node.get("/v1/pools"))["items"] if each["name"] == "files")
    assert in_files["used_nbytes"] > 0
    landing = node.here.regions["layers"]
    expected = node.here.expect(b"layers", [2], landing)
    asked = {"keys": ["l"], "layout": layers, "agent": "here", "region": "layers", "blocks": [2]}
    assert await fetch(**asked, notify="layers", timeout_s=30.0, worth_s=30.0) == ["done"]
    await expected
    np.testing.assert_array_equal(node.memory["here/layers"][:, 2], node.memory["there/layers"][:, 3])

    # A right to write in place of a tag, of the session with the daemon's own agent.
    (own,) = (peer for peer in node.there.peers if peer.name == "daemon/node-a")
    lease_to_write = node.regions["there"].grant(own, [10], mode="write", ttl_s=LONG_S)
    assert await fetch(blocks=[10], notify="", lease=str(lease_to_write.token)) == ["done"]
    np.testing.assert_array_equal(there[10], here[5])
    lease_to_write.revoke_blocking()
    assert await fetch(blocks=[10], notify="", lease=str(lease_to_write.token)) == "lease-ended"
    assert await fetch(keys=["none"]) == await fetch(layout=layers) == "not-found"

    # Leases of pages: who may read them and for how long.
    for salt_of, block in zip(salts, blocks, strict=True):
        leased = schema.PageLease.model_validate(await lease(holder="there", ttl_s=LONG_S, **salt_of))
        (part,) = leased.parts
        assert leased.seconds_left == LONG_S
        await node.here.connect(part.descriptor())
        await node.there.connect(part.descriptor())
        with pytest.raises(TransferError) as refused:
            await node.here.read(
                node.regions["here"], part.descriptor(), part.blocks, [0], lease=part.lease()
            )
        assert refused.value.code == "not-permitted"
        await node.there.read(node.regions["there"], part.descriptor(), part.blocks, [0], lease=part.lease())
        np.testing.assert_array_equal(there[0], here[block])
    assert (await lease(ttl_s=LONG_S + 1, timeout_s=20.0, worth_s=20.0))["seconds_left"] == LONG_S + 1
    for wrong in ({"keys": ["none"]}, {"layout": layers}):
        assert not (await lease(**wrong, ttl_s=LONG_S))["parts"]

    # Of the pages that are named, and of no others.
    pages = "/v1/pages"
    (pinned,) = (each for each in (await node.get(pages))["items"] if each["pinned"])
    assert (pinned["key"], pinned["layout"]) == ("l", layers)
    assert await which("unpin", keys=["l"], layout=layers) == ["done"]
    for salt_of in salts:
        assert await which("pin", **salt_of) == ["done"]
        (pinned,) = (each for each in (await node.get(pages))["items"] if each["pinned"])
        assert pinned["key"] == "k"
        assert {name: pinned[name] for name in salt_of} == salt_of
        assert await which("drop", **salt_of) == ["done"]
        assert await which("pin", **salt_of) == ["missing"]
    assert {each["key"] for each in (await node.get(pages))["items"]} == {"l", "late", "safe"}
