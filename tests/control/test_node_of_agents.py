"""A daemon with attached agents: what REST shows of them, and what it makes them do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, Region
from kvxfer.control import AsyncClient, layout_digest, schema
from tests.control.serving import BOUND_S, Served, serving

EVERYTHING = ("show", "drain", "move", "grant", "settings")
ENDED = r'kvxfer_transfers_ended_total{code="(.*)",outcome="(.*)",role="(.*)"} 1.0'
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Node:
    """A daemon, a client of it, and agents ``here`` and ``there``, each with 16 blocks of 1 KiB."""

    def __init__(self, served: Served, client: httpx.AsyncClient, agents: list[Agent]) -> None:
        self.served = served
        self.client = client
        self.here, self.there = agents
        self.memory = {agent.name: np.zeros((16, 1024), np.uint8) for agent in agents}
        self.regions: dict[str, Region] = {
            agent.name: agent.register("kv", self.memory[agent.name]) for agent in agents
        }

    async def get(self, path: str, **params: Any) -> Any:
        answer = await self.client.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until(self, path: str, is_so: Callable[[Any], bool], **params: Any) -> Any:
        """Waits until a path's answer passes a check, and returns it."""
        async with asyncio.timeout(BOUND_S):
            while True:
                if is_so(found := await self.get(path, **params)):
                    return found
                await asyncio.sleep(0.02)

    async def move(self, **changes: Any) -> httpx.Response:
        asked = {
            "agent": "here",
            "region": "kv",
            "remote_agent": "there",
            "remote_region": "kv",
            "src_blocks": [1, 2],
            "dst_blocks": [3, 4],
        }
        return await self.client.post("/v1/transfers", json={**asked, **changes})

    async def lease(self, agent: str = "there", **changes: Any) -> dict[str, Any]:
        answer = await self.client.post("/v1/leases", json={"agent": agent, "region": "kv", **changes})
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found


@asynccontextmanager
async def node_of_agents(folder: Path, may: tuple[str, ...] = EVERYTHING, **more: Any) -> AsyncIterator[Node]:
    async with serving(folder, **more) as served, served.unix() as client, AsyncExitStack() as stack:
        options = AgentOptions(daemon=str(folder / "run"), daemon_may=may)
        agents = [await stack.enter_async_context(Agent(name, options)) for name in ("here", "there")]
        node = Node(served, client, agents)
        await node.until(
            "/v1/regions", lambda found: sum(region["name"] == "kv" for region in found["items"]) == 2
        )
        yield node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with node_of_agents(tmp_path) as made:
        yield made


async def test_agents_are_shown_with_their_regions_peers_and_rails(node: Node) -> None:
    peer = await node.here.connect(node.there.address)
    items = (await node.get("/v1/agents"))["items"]
    # In the order in which they attached, each from a thread of its own.
    assert {(item["name"], item["id"]) for item in items} == {
        (agent.name, agent.incarnation.hex()) for agent in (node.here, node.there)
    }
    detail = await node.get("/v1/agents/here")
    assert detail["options"]["daemon_may"] == list(EVERYTHING)
    assert "secret" not in str(detail["options"]) or detail["options"]["secret"] is None
    assert await node.get(f"/v1/agents/{node.here.incarnation.hex()}")
    (region,) = (await node.get("/v1/agents/here/regions"))["items"]
    assert (region["name"], region["num_blocks"], region["nbytes"]) == ("kv", 16, 16 * 1024)
    assert region["layout"]
    found = await node.until("/v1/agents/here/peers", lambda found: found["items"])
    assert (found["items"][0]["name"], found["items"][0]["regions"]) == ("there", ["kv"])
    rails = await node.until("/v1/rails", lambda found: found["items"], agent="there")
    assert rails["items"][0]["peer_name"] == "here"
    topology = await node.until("/v1/topology", lambda found: len(found["links"]) == 2)
    assert len(topology["agents"]) == 2
    assert (await node.client.get("/v1/agents/nobody")).status_code == 404
    peer.disconnect()
    await node.regions["here"].deregister()
    for agent, path in (("here", "peers"), ("there", "peers"), ("here", "regions")):
        await node.until(f"/v1/agents/{agent}/{path}", lambda found: not found["items"])


@pytest.mark.parametrize("name", ["daemon/node-a", "a/regions/b", "a//b", "a b/%2F?#", "ü/é", "../x"])
async def test_agents_whose_names_have_slashes_are_asked_for_by_name(node: Node, name: str) -> None:
    options = AgentOptions(daemon=str(node.served.socket.parent), daemon_may=EVERYTHING)
    async with Agent(name, options) as agent:
        agent.register("kv", np.zeros((4, 1024), np.uint8))
        id_ = agent.incarnation.hex()
        await node.until("/v1/regions", lambda found: found["items"], agent=id_)
        async with AsyncClient(node.served.socket) as client:
            assert (await client.get_agent(name)).id == id_
            assert [region.agent for region in (await client.list_agent_regions(name)).items] == [id_]
            await client.connect_agent(name, schema.ConnectRequest(remote_agent="there"))
            peers = await node.until("/v1/peers", lambda found: found["items"], agent=id_)
            assert peers["items"][0]["name"] == "there"
            assert [peer.name for peer in (await client.list_agent_peers(name)).items] == ["there"]
        if "//" not in name and "%" not in name and ".." not in name:
            assert (await node.get(f"/v1/agents/{name}/peers"))["items"][0]["name"] == "there"


async def test_pages_are_moved_by_rest_under_a_lease(node: Node) -> None:
    node.memory["there"][[1, 2]] = 7
    lease = await node.lease(blocks=[1, 2])
    made = (await node.move(lease=lease["token"], context=f"req {TRACE}", tenant="red")).json()
    assert made["created_by"] == f"uid {os.getuid()}"
    done = await node.get(f"/v1/transfers/{made['id']}", wait_s=30)
    assert (done["state"], done["tenant"], done["trace_parent"]) == ("done", "red", TRACE)
    assert (node.memory["here"][[3, 4]] == 7).all()
    whole = await node.until(f"/v1/transfers/{made['id']}", lambda found: found["source"] is not None)
    assert (whole["source"]["agent_name"], whole["destination"]["agent_name"]) == ("there", "here")
    assert whole["destination"]["ended_after_us"] > 0
    assert whole["destination"]["region_name"] == whole["source"]["region_name"] == "kv"
    assert whole["nbytes"] == 2048
    # A transfer has the id of its creation and the one that both ends know: either finds it.
    assert (whole["made_id"], whole["id"] != made["id"]) == (made["id"], True)
    assert await node.get(f"/v1/transfers/{whole['id']}") == whole
    events = (await node.get("/v1/events/recent", topic="transfers.done"))["items"]
    assert {each["data"]["id"] for each in events} == {whole["id"]}
    # The other end may report first, before its id is known to be this transfer's.
    assert [each["data"]["made_id"] for each in events if each["data"]["name"] == "here"] == [made["id"]]
    for one, other in (("source", "destination"), ("destination", "source")):
        assert whole[one]["peer"] == whole[other]["agent"]
        assert (whole[one]["peer_name"], whole[one]["remote_region_name"]) == (
            whole[other]["agent_name"],
            "kv",
        )
    for search in ({"context": "0af7651916cd43dd8448eb211c80319c"}, {"tenant": "red"}, {"agent": "there"}):
        (found,) = (await node.get("/v1/transfers", **search))["items"]
        assert found["id"] == whole["id"], search
    assert (await node.client.delete(f"/v1/transfers/{made['id']}")).json()["found"] is False


async def test_of_a_long_answer_a_repetition_gets_the_status_and_the_digest(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvxfer.control.state.answers.LONG_NBYTES", 10)
    asked = {"agent": "there", "region": "kv"}
    first, again = [
        await node.client.post("/v1/leases", json=asked, headers={"Idempotency-Key": "k"}) for _ in range(2)
    ]
    assert (first.status_code, again.status_code, again.json()) == (201, 201, {})
    digest = base64.b64encode(hashlib.sha256(first.content).digest()).decode()
    assert again.headers["Repr-Digest"] == f"sha-256=:{digest}:"
    assert again.headers["Idempotent-Replay"] == "digest"
    assert len((await node.until("/v1/leases", lambda found: found["items"]))["items"]) == 1


async def test_a_transfer_that_waits_is_shown_open_and_cancelled(node: Node) -> None:
    """A write with a tag that is not expected yet."""
    await node.here.connect(node.there.address)
    made = (await node.move(verb="write", notify="tag", context="waits", timeout_s=120.0)).json()
    assert made["state"] == "pending"
    open_ = await node.until("/v1/open-transfers", lambda found: found["items"], agent="here")
    assert open_["items"][0]["context"] == "waits"
    assert (await node.get("/v1/drain"))["running"] == 1
    # It is found by the id that both ends have and by the one that its creation answered, with its stage.
    found = await node.until(f"/v1/transfers/{made['id']}", lambda found: found["id"] != made["id"])
    assert (found["made_id"], found["source"]["state"], found["source"]["peer_name"]) == (
        made["id"],
        "serving",
        "there",
    )
    assert (await node.get(f"/v1/transfers/{found['id']}"))["source"]["state"] == "serving"
    assert (await node.client.post(f"/v1/transfers/{made['id']}/cancel")).json()["found"]
    ended = await node.get(f"/v1/transfers/{made['id']}", wait_s=30)
    assert (ended["state"], ended["code"]) == ("cancelled", "cancelled")
    assert (await node.get("/v1/drain"))["running"] == 0


@pytest.mark.parametrize("step_s", [1e6, -1e6])
async def test_deadlines_are_kept_when_the_time_of_day_is_set(node: Node, step_s: float) -> None:
    await node.here.connect(node.there.address)
    made = (await node.move(verb="write", notify="tag", timeout_s=120.0)).json()
    await node.client.put("/v1/drain", json={"deadline_s": 600.0})
    daemon = node.served.daemon
    for part in (daemon, daemon.moves, daemon.drains):
        part_clock = "clock" if part is daemon else "_clock"
        setattr(part, part_clock, lambda: time.time() + step_s)
    drain = await node.get("/v1/drain")
    assert (drain["ready"], drain["running"] > 0) == (False, True)
    assert (await node.get(f"/v1/transfers/{made['id']}"))["state"] == "pending"
    async with asyncio.timeout(BOUND_S):
        ending = asyncio.create_task(daemon.drains.stop_taking(3600.0))
        await node.client.post(f"/v1/transfers/{made['id']}/cancel")
        await ending
    assert not daemon.drains.count_running()


@pytest.mark.parametrize("by", ["writer", "reader", "expecting"])
async def test_a_cancelled_transfer_is_cancelled_at_both_ends(node: Node, by: str) -> None:
    """Whichever end's program cancels it, no end counts as failed, and no alert of failures sees it."""
    peer = await node.here.connect(node.there.address)
    here, there = node.regions["here"], peer.regions["kv"]
    roles = {"source", "destination"} | ({"expectation"} if by == "expecting" else set())
    work: Any
    if by == "reader":
        lease = node.regions["there"].grant(None)
        work = node.here.read(here, there, [1], [1], lease=lease.token, after=node.here.trigger())
    else:
        work = node.here.write(here, there, [1], [3], notify=b"tag", hold=True)
    await node.until("/v1/open-transfers", lambda found: len(found["items"]) == 2)
    if by == "expecting":
        work = node.there.expect(b"tag", [3])
    work.cancel()
    counted: set[tuple[str, str, str]] = set()
    async with asyncio.timeout(BOUND_S):
        while len(counted) < len(roles):
            text = (await node.client.get("/metrics")).text
            counted = set(re.findall(ENDED, text))
            await asyncio.sleep(0.02)
    assert counted == {("cancelled", "cancelled", role) for role in roles}


async def test_agents_of_one_name_are_one_series_each(node: Node) -> None:
    """Replicas may have one name; a scrape that has a series twice is refused."""
    options = AgentOptions(daemon=str(node.served.socket.parent), daemon_may=EVERYTHING)
    async with Agent("here", options) as other:
        other.register("more", np.zeros((16, 1024), np.uint8))
        await other.connect(node.there.address)
        node.regions["here"].grant(None, blocks=[1])
        other.regions["more"].grant(None, blocks=[1, 2])
        await node.until("/v1/leases", lambda found: len(found["items"]) == 2)
        await node.until("/v1/regions", lambda found: len(found["items"]) == 3)
        await node.until("/v1/agents/there/peers", lambda found: found["items"])
        text = (await node.client.get("/metrics")).text
    names = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names))
    for wanted in ("regions", "region_bytes"):
        assert f'kvxfer_agent_{wanted}{{agent="here"}} {float(2 if wanted == "regions" else 2 << 14)}' in text
    assert 'kvxfer_exports_outstanding{agent="here"} 2.0' in text
    assert 'kvxfer_exports_outstanding_bytes{agent="here"} 3072.0' in text


async def test_a_daemon_that_ends_takes_nothing_new_and_waits_for_what_it_began(node: Node) -> None:
    await node.here.connect(node.there.address)
    made = (await node.move(verb="write", notify="tag", timeout_s=120.0)).json()
    ending = asyncio.create_task(node.served.daemon.drains.stop_taking(BOUND_S))
    await asyncio.sleep(0)
    asked = {"agent": "there", "region": "kv"}
    refused = [await node.move(), await node.client.post("/v1/leases", json=asked)]
    assert [(answer.status_code, answer.json()["code"]) for answer in refused] == [(503, "draining")] * 2
    assert "it is stopping" in (await node.client.get("/readyz")).json()["reasons"]
    assert not ending.done()
    await node.client.post(f"/v1/transfers/{made['id']}/cancel")
    async with asyncio.timeout(BOUND_S):
        await ending
    assert not node.served.daemon.drains.count_running()


async def test_a_transfer_of_an_agents_own_is_cancelled_by_its_id(node: Node) -> None:
    peer = await node.here.connect(node.there.address)
    transfer = node.here.write(
        node.regions["here"], peer.regions["kv"], [1], [2], notify=b"tag", timeout_s=120.0
    )
    found = await node.until("/v1/open-transfers", lambda found: found["items"], agent="here")
    (item,) = found["items"]
    async with node.served.tcp(await node.served.make_token("transfer", tenants=["red"])) as of_red:
        assert not (await of_red.get("/v1/open-transfers")).json()["items"]
        for method in ("GET", "DELETE"):
            assert (await of_red.request(method, f"/v1/transfers/{item['id']}")).status_code == 404
    assert (await node.get(f"/v1/transfers/{item['id']}"))["state"] == "pending"
    assert (await node.client.delete(f"/v1/transfers/{item['id']}")).json()["found"]
    with pytest.raises(Exception, match="cancel"):
        await transfer


async def test_what_an_owner_does_not_let_the_daemon_do_is_refused_in_words(tmp_path: Path) -> None:
    async with node_of_agents(tmp_path, may=("show",)) as node:
        for answer in (
            await node.move(),
            await node.client.post("/v1/leases", json={"agent": "here", "region": "kv"}),
            await node.client.post("/v1/agents/here/peers", json={"remote_agent": "there"}),
            await node.client.patch("/v1/settings", json={"agents_log_level": {"here": "debug"}}),
            await node.client.patch("/v1/settings", json={"agents": {"here": SET}}),
        ):
            assert (answer.status_code, answer.json()["code"]) == (403, "not-permitted")
            assert "daemon_may" in answer.json()["detail"]
        drain = (await node.client.put("/v1/drain", json={"deadline_s": 60.0})).json()
        assert all("daemon_may" in agent["refused"] for agent in drain["agents"])
        assert not node.here.peers


SET = {"peers": {"there": {"max_bytes_per_s": 5000, "least_priority": 2}}, "rails": {"unix": "off"}}


async def test_settings_of_an_agent_hold_for_its_name_over_restarts_of_both_ends(tmp_path: Path) -> None:
    async with node_of_agents(tmp_path) as node:
        answer = await node.client.patch("/v1/settings", json={"agents": {"here": SET}})
        assert answer.json()["agents"] == {"here": {**SET, "refused": {}}}
        assert node.here.limits["there"].max_bytes_per_s == 5000
        off = await node.until("/v1/rails", lambda found: found["items"], agent="here")
        assert [(rail["transport"], rail["state"]) for rail in off["items"]] == [("unix", "off")]
        detail = await node.get("/v1/agents/here")
        assert detail["limits"]["there"] == {"max_bytes_per_s": 5000, "least_priority": 2}
    async with node_of_agents(tmp_path) as node:  # another daemon, and other processes with that name
        await node.until("/v1/rails", lambda found: found["items"], agent="here")
        assert node.here.limits["there"].least_priority == 2
        assert not node.there.limits
        # What an agent cannot do is not kept.
        await node.client.patch("/v1/settings", json={"agents": {"there": {"rails": {"unix": "off"}}}})
        await node.here.connect(node.there.address)
        refused = await node.client.patch(
            "/v1/settings", json={"agents": {"here": {"rails": {"loopback": "off"}}}}
        )
        assert (refused.status_code, refused.json()["code"]) == (409, "unsupported")
        assert "'there'" in refused.json()["detail"]
        assert (await node.get("/v1/settings"))["agents"]["here"]["rails"] == {"unix": "off"}
        # By id; the settings of an agent that has gone can be removed, too.
        for none in (dict[str, int](), None):
            await node.client.patch("/v1/settings", json={"agents": {"here": {"peers": SET["peers"]}}})
            assert node.here.limits["there"].least_priority == 2
            by_id = {node.here.incarnation.hex(): {"peers": {"there": none}}}
            await node.client.patch("/v1/settings", json={"agents": by_id})
            assert not node.here.limits
        await node.here.aclose()
        await node.until("/v1/agents", lambda found: len(found["items"]) == 1)
        answer = await node.client.patch("/v1/settings", json={"agents": {"here": None, "there": None}})
        assert answer.json()["agents"] == {}
        assert not node.there.rails_off


async def test_transfers_of_a_tenant_wait_for_its_rate(node: Node) -> None:
    await node.client.patch("/v1/settings", json={"tenant_bytes_per_s": {"red": 1}})
    assert (await node.move(tenant="red")).status_code == 201, "one may overdraw"
    refused = await node.move(tenant="red")
    assert (refused.status_code, refused.json()["code"]) == (429, "rate-limited")
    assert int(refused.headers["retry-after"]) > 1000
    assert (await node.move(tenant="blue")).status_code == 201
    waits = asyncio.create_task(node.move(tenant="red", timeout_s=4000.0))
    await asyncio.sleep(0.1)  # it is not refused
    assert not waits.done()
    await node.client.patch("/v1/settings", json={"tenant_bytes_per_s": {"red": None}})
    made = await asyncio.wait_for(waits, BOUND_S)
    assert made.status_code == 201, made.text


async def test_an_agent_whose_owner_has_changed_his_mind_is_shown_with_its_words(tmp_path: Path) -> None:
    async with node_of_agents(tmp_path) as node:
        await node.client.patch("/v1/settings", json={"agents": {"here": SET}})
    async with node_of_agents(tmp_path, may=("show",)) as node:
        found = await node.until("/v1/settings", lambda found: found["agents"]["here"]["refused"])
        assert "daemon_may" in found["agents"]["here"]["refused"][node.here.incarnation.hex()]
        events = (await node.get("/v1/events/recent", topic="settings"))["items"]
        assert [event["topic"] for event in events] == ["settings.refused"]
        assert not node.here.limits


async def test_a_drain_reaches_the_agents_and_is_taken_back(node: Node) -> None:
    heard: list[float | None] = []
    node.here.on_draining(lambda until: 1 / 0)
    node.here.on_draining(heard.append)
    before = time.monotonic()
    await node.client.put("/v1/drain", json={"deadline_s": 60.0})
    for agent in (node.here, node.there):
        assert before + 59 <= (agent.draining or 0.0) <= time.monotonic() + 60
    found = await node.until("/v1/drain", lambda found: all(agent["draining"] for agent in found["agents"]))
    assert found["ready"]
    events = (await node.get("/v1/events/recent", topic="drain"))["items"]
    assert [event["topic"] for event in events] == ["drain.begun", "drain.ready"]
    await node.client.delete("/v1/drain")
    assert not node.here.draining
    assert (heard[0] is None, heard[-1]) == (False, None)  # an agent that reports late may be told twice


async def test_an_agent_that_closes_is_gone_and_ends_what_it_was_told_to_begin(node: Node) -> None:
    await node.here.connect(node.there.address)
    made = (await node.move(verb="write", notify="tag", timeout_s=600.0)).json()
    await node.here.aclose()
    await node.until("/v1/agents", lambda found: len(found["items"]) == 1)
    ended = await node.get(f"/v1/transfers/{made['id']}", wait_s=30)
    assert ended["state"] in ("failed", "cancelled")
    assert (await node.get("/v1/drain"))["running"] == 0
    topics = [event["topic"] for event in (await node.get("/v1/events/recent", topic="agents"))["items"]]
    assert topics.count("agents.attached") == 2
    assert topics[-1] == "agents.gone"


async def test_codes_of_agents_come_through(node: Node) -> None:
    await node.here.connect(node.there.address)
    for changes, status, code in (
        ({"region": "nothing"}, 404, "unknown-region"),
        ({"remote_region": "nothing"}, 404, "unknown-region"),
        ({"agent": "nobody"}, 404, "not-found"),
        ({"src_blocks": [99, 1]}, 409, "out-of-range"),
        ({"dst_blocks": [1, 1]}, 409, "duplicate-block"),
        ({"dst_blocks": [1]}, 409, "length-mismatch"),
        ({"remote_agent": "f" * 32}, 502, "unreachable"),
        ({"remote_agent": "tcp://127.0.0.1:1"}, 502, "unreachable"),
    ):
        answer = await node.move(**changes)
        assert (answer.status_code, answer.json()["code"]) == (status, code), (changes, answer.text)


async def test_an_agent_connects_by_rest_once(node: Node) -> None:
    async def connect(remote: str, agent: str = "here") -> httpx.Response:
        return await node.client.post(f"/v1/agents/{agent}/peers", json={"remote_agent": remote})

    made = await connect("there")
    assert made.status_code == 200, made.text
    found = made.json()
    assert (found["agent_name"], found["name"], found["regions"]) == ("here", "there", ["kv"])
    assert found["id"] == node.there.incarnation.hex()
    assert found["rails"]
    for remote in ("there", node.there.address, node.there.incarnation.hex()):
        assert (await connect(remote)).json()["session"] == found["session"], remote
    await node.until("/v1/peers", lambda told: len(told["items"]) == 2)
    back = (await connect("here", "there")).json()
    assert back["id"] == node.here.incarnation.hex()
    assert len(node.there.peers) == 1
    for agent, remote, status, code in (
        ("nobody", "there", 404, "not-found"),
        ("here", "who", 409, "invalid-argument"),
        ("here", "f" * 32, 502, "unreachable"),
        ("here", "tcp://127.0.0.1:1", 502, "unreachable"),
    ):
        answer = await connect(remote, agent)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


async def test_a_region_keeps_its_name_in_records_when_it_has_gone(node: Node) -> None:
    lease = await node.lease(blocks=[1, 2])
    made = (await node.move(lease=lease["token"])).json()
    await node.until(f"/v1/transfers/{made['id']}", lambda found: found["source"] and found["destination"])
    await node.regions["there"].deregister()
    await node.there.aclose()
    await node.until("/v1/agents", lambda found: len(found["items"]) == 1)
    found = await node.get(f"/v1/transfers/{made['id']}")
    for end, name in (("source", "there"), ("destination", "here")):
        assert (found[end]["region_name"], found[end]["agent_name"]) == ("kv", name)
        assert found[end]["remote_region_name"] == "kv"


async def test_pages_are_parked_once_at_a_rate_and_gone_after_a_restart(tmp_path: Path) -> None:
    async with node_of_agents(tmp_path, own_agent=True, pool_gib=1 / 64) as node:
        node.memory["here"][5] = 9
        salt = {"model": "m", "tenant": "red"}
        park = {**salt, "keys": ["k1"], "agent": "here", "region": "kv", "blocks": [5]}
        parked = await node.client.post("/v1/pages/park", json=park)
        assert parked.status_code == 200, parked.text
        assert [page["state"] for page in parked.json()["pages"]] == ["parked"]
        assert (await node.client.post("/v1/pages/park", json=park)).json()["pages"][0]["state"] == "present"
        unknown = await node.client.post("/v1/pages/park", json={**park, "keys": ["k2"], "agent": "nobody"})
        assert unknown.status_code == 409
        assert "`kvxfer agents`" in unknown.json()["detail"]
        which = {**salt, "keys": ["k1"], "layout": layout_digest(node.regions["here"].layout)}
        assert parked.json()["layout"] == which["layout"]
        fetch = {**which, "agent": "there", "region": "kv", "blocks": [6]}
        # A tenant's parks and fetches share one rate.
        await node.client.patch("/v1/settings", json={"tenant_bytes_per_s": {"red": 1}})
        for path, asked, status in (
            ("park", {**park, "keys": ["k3"]}, 200),
            ("fetch", fetch, 429),
            ("park", {**park, "keys": ["k4"]}, 429),
            ("park", {**park, "tenant": "blue"}, 200),
        ):
            answer = await node.client.post(f"/v1/pages/{path}", json=asked)
            assert answer.status_code == status, answer.text
        await node.client.patch("/v1/settings", json={"tenant_bytes_per_s": {"red": None}})
        dropped = await node.client.post("/v1/pages/drop", json=which)
        assert dropped.json()["pages"] == [{"key": "k1", "state": "done"}]
    async with serving(tmp_path, own_agent=True, pool_gib=1 / 64) as served, served.unix() as client:
        lost = await client.post("/v1/pages/pin", json={**which, "keys": ["k1", "k3"]})
        assert [page["state"] for page in lost.json()["pages"]] == ["missing", "gone"]
