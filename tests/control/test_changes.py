"""Changes by REST: idempotency keys, the audit log, settings, the drain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.control.serving import DIGEST, MOVE, SALT, Served, program, serving

KEY = {"Idempotency-Key": "one"}


async def test_a_post_with_a_key_is_done_once(served: Served) -> None:
    async with served.unix() as client:
        grant = {"agent": "nobody", "region": "kv"}
        first = await client.post("/v1/leases", json=grant, headers=KEY)
        assert first.status_code == 404, "nothing was done: the key is free again"
        pin = {"model": "m", "keys": ["k"], "layout": "0" * 64}
        for _ in range(2):
            assert (await client.post("/v1/pages/pin", json=pin, headers=KEY)).json()["code"] == "not-found"
        made = await client.post("/v1/tokens", json={"name": "x"}, headers=KEY)
        assert made.status_code == 201
        again = await client.post("/v1/tokens", json={"name": "x"}, headers=KEY)
        assert (again.status_code, again.json()["code"]) == (409, "conflict")
        other = await client.post("/v1/tokens", json={"name": "y"}, headers=KEY)
        assert (other.status_code, other.json()["code"]) == (409, "conflict")
        names = [token["name"] for token in (await client.get("/v1/tokens")).json()["items"]]
        assert sorted(names) == ["admin", "x"]
    # Another caller's key is another key.
    async with served.tcp(await served.make_token("admin")) as client:
        assert (await client.post("/v1/tokens", json={"name": "z"}, headers=KEY)).status_code == 201
        for key in (b"", "ü".encode(), b"a b", b"x" * 129):
            answer = await client.post("/v1/tokens", json={"name": "z"}, headers={b"Idempotency-Key": key})
            assert answer.status_code == 422, key


async def test_settings_change_what_is_named_and_outlive_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.unix() as client:
        quotas = {"red": 5, "blue": 6}
        answer = await client.patch("/v1/settings", json={"page_quotas_nbytes": quotas})
        assert answer.json() == {
            "log_level": "info",
            "agents_log_level": {},
            "page_quotas_nbytes": quotas,
            "tenant_bytes_per_s": {},
            "agents": {},
        }
        change: dict[str, Any] = {"page_quotas_nbytes": {"red": None}, "log_level": "warning"}
        change["tenant_bytes_per_s"] = {"red": 7, "blue": None}
        assert (await client.patch("/v1/settings", json=change)).status_code == 200
        wrongs: list[Any] = [
            {"log_level": "loud"},
            {"page_quotas_nbytes": {"red": -1}},
            {"rate": 1},
            {"tenant_bytes_per_s": {"red": 0}},
            {"agents": {"a": {"rails": {"shm": "maybe"}}}},
            {"agents": {"a": {"peers": {"b": {"max_bytes_per_s": 0}}}}},
            {"agents": {"a": {"peers": {"b": {"least_priority": 256}}}}},
            {"agents": {"a": {"peers": {"": {}}}}},
            [],
            None,
        ]
        for wrong in wrongs:
            assert (await client.patch("/v1/settings", json=wrong)).status_code == 422, wrong
        unknown = await client.patch("/v1/settings", json={"agents_log_level": {"nobody": "debug"}})
        assert unknown.json()["code"] == "not-found"
        unknown = await client.patch("/v1/settings", json={"agents": {"nobody": {"rails": {"shm": "off"}}}})
        assert unknown.json()["code"] == "not-found"
    async with serving(tmp_path) as served, served.unix() as client:
        found = (await client.get("/v1/settings")).json()
        assert (found["log_level"], found["page_quotas_nbytes"]) == ("warning", {"blue": 6})
        assert found["tenant_bytes_per_s"] == {"red": 7}
        await client.patch("/v1/settings", json={"log_level": "info"})


async def test_changes_at_the_same_time_are_all_made(tmp_path: Path) -> None:
    tenants = [f"t{number}" for number in range(40)]
    async with serving(tmp_path) as served, served.unix() as client:

        async def change(tenant: str) -> None:
            one = {"page_quotas_nbytes": {tenant: 5}, "tenant_bytes_per_s": {tenant: 6}}
            assert (await client.patch("/v1/settings", json=one)).status_code == 200

        await asyncio.gather(*map(change, tenants))
    async with serving(tmp_path) as served, served.unix() as client:
        found = (await client.get("/v1/settings")).json()
    assert found["page_quotas_nbytes"] == dict.fromkeys(tenants, 5)
    assert found["tenant_bytes_per_s"] == dict.fromkeys(tenants, 6)


async def test_a_drain_refuses_new_work_and_is_taken_back(served: Served) -> None:
    async with served.unix() as client:
        assert (await client.get("/readyz")).status_code == 200
        begun = (await client.put("/v1/drain", json={"deadline_s": 60.0})).json()
        assert begun["draining"]
        assert begun["ready"]
        place = {"agent": "a", "region": "kv", "blocks": [1]}
        for path, body in (
            ("transfers", MOVE),
            ("leases", place),
            ("agents/a/peers", {"remote_agent": "b"}),
            ("pages/park", SALT | place),
            ("pages/fetch", {**SALT, **place, "layout": DIGEST}),
            ("pages/lease", {**SALT, "layout": DIGEST}),
        ):
            answer = await client.post(f"/v1/{path}", json=body)
            assert (answer.status_code, answer.json()["code"]) == (503, "draining"), path
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["it is draining"])
        assert (await client.get("/healthz")).status_code == 200
        ended = (await client.delete("/v1/drain")).json()
        assert not ended["draining"]
        assert (await client.post("/v1/transfers", json=MOVE)).json()["code"] == "not-found"
        topics = [event["topic"] for event in (await client.get("/v1/events/recent")).json()["items"]]
        assert [topic for topic in topics if topic.startswith("drain")] == [
            "drain.begun",
            "drain.ready",
            "drain.ended",
        ]


def test_a_drained_node_that_is_killed_drains_still(tmp_path: Path) -> None:
    with program(tmp_path) as daemon, daemon.client() as client:
        assert client.put("/v1/drain", json={}).json()["draining"]
        daemon.end(9)
    with program(tmp_path) as daemon, daemon.client() as client:
        assert client.get("/v1/drain").json()["draining"]
        assert client.delete("/v1/drain").status_code == 200
        daemon.end(9)
    with program(tmp_path) as daemon, daemon.client() as client:
        assert not client.get("/v1/drain").json()["draining"]


async def test_an_index_is_never_given_twice(tmp_path: Path) -> None:
    last = 0
    for clean in (True, False, True):
        if clean:
            async with serving(tmp_path) as served, served.unix() as client:
                await client.put("/v1/drain", json={})
                await client.delete("/v1/drain")
                events = (await client.get("/v1/events/recent")).json()["items"]
        else:

            def killed() -> list[dict[str, int]]:
                with program(tmp_path) as daemon, daemon.client() as client:
                    client.put("/v1/drain", json={})
                    client.delete("/v1/drain")
                    found: list[dict[str, int]] = client.get("/v1/events/recent").json()["items"]
                    daemon.end(9)
                    return found

            events = await asyncio.to_thread(killed)
        indexes = [event["index"] for event in events]
        assert indexes == list(range(indexes[0], indexes[0] + len(indexes)))
        assert indexes[0] > last
        last = indexes[-1]
