"""Permissions: each endpoint, with each role and kind of token."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.control.app.build import DaemonApp
from kvxfer.control.state.tokens import ROLES
from tests.control.serving import Served, serving

DIGEST = "0" * 64
SALT = {"model": "m", "keys": ["k"]}
MOVE = {
    "agent": "a",
    "region": "kv",
    "remote_agent": "b",
    "remote_region": "kv",
    "src_blocks": [1],
    "dst_blocks": [2],
}

# Each endpoint, the role that it needs (None: no role), and a request that passes its schema.
ENDPOINTS: dict[tuple[str, str], tuple[str | None, Any]] = {
    ("GET", "/healthz"): (None, None),
    ("GET", "/readyz"): (None, None),
    ("GET", "/metrics"): ("read", None),
    ("GET", "/v1/node"): ("read", None),
    ("GET", "/v1/topology"): ("read", None),
    ("GET", "/v1/doctor"): ("read", None),
    ("GET", "/v1/settings"): ("read", None),
    ("PATCH", "/v1/settings"): ("admin", {}),
    ("GET", "/v1/drain"): ("read", None),
    ("PUT", "/v1/drain"): ("admin", {}),
    ("DELETE", "/v1/drain"): ("admin", None),
    ("GET", "/v1/agents"): ("read", None),
    ("GET", "/v1/agents/{agent}"): ("read", None),
    ("GET", "/v1/agents/{agent}/regions"): ("read", None),
    ("GET", "/v1/agents/{agent}/peers"): ("read", None),
    ("POST", "/v1/agents/{agent}/peers"): ("transfer", {"remote_agent": "b"}),
    ("GET", "/v1/regions"): ("read", None),
    ("GET", "/v1/peers"): ("read", None),
    ("GET", "/v1/rails"): ("read", None),
    ("POST", "/v1/transfers"): ("transfer", MOVE),
    ("GET", "/v1/transfers"): ("read", None),
    ("GET", "/v1/open-transfers"): ("read", None),
    ("GET", "/v1/transfers/{transfer}"): ("read", None),
    ("DELETE", "/v1/transfers/{transfer}"): ("transfer", None),
    ("POST", "/v1/transfers/{transfer}/cancel"): ("transfer", None),
    ("GET", "/v1/request-trace"): ("read", None),
    ("GET", "/v1/request-trace/perfetto"): ("read", None),
    ("POST", "/v1/traces"): ("transfer", {}),
    ("GET", "/v1/leases"): ("read", None),
    ("POST", "/v1/leases"): ("transfer", {"agent": "a", "region": "kv"}),
    ("POST", "/v1/leases/{lease}/extend"): ("transfer", {"ttl_s": 1.0}),
    ("DELETE", "/v1/leases/{lease}"): ("transfer", None),
    ("GET", "/v1/pages"): ("read", None),
    ("POST", "/v1/pages/park"): ("transfer", {**SALT, "agent": "a", "region": "kv", "blocks": [1]}),
    ("POST", "/v1/pages/fetch"): (
        "transfer",
        {**SALT, "layout": DIGEST, "agent": "a", "region": "kv", "blocks": [1]},
    ),
    ("POST", "/v1/pages/lease"): ("transfer", {**SALT, "layout": DIGEST}),
    ("POST", "/v1/pages/lease/{lease}/extend"): ("transfer", {"ttl_s": 1.0}),
    ("DELETE", "/v1/pages/lease/{lease}"): ("transfer", None),
    ("POST", "/v1/pages/pin"): ("transfer", {**SALT, "layout": DIGEST}),
    ("POST", "/v1/pages/unpin"): ("transfer", {**SALT, "layout": DIGEST}),
    ("POST", "/v1/pages/drop"): ("transfer", {**SALT, "layout": DIGEST}),
    ("GET", "/v1/pools"): ("read", None),
    ("GET", "/v1/whoami"): ("read", None),
    ("GET", "/v1/tokens"): ("admin", None),
    ("POST", "/v1/tokens"): ("admin", {"name": "x"}),
    ("DELETE", "/v1/tokens/{token}"): ("admin", None),
    ("GET", "/v1/directory"): ("read", None),
    ("PUT", "/v1/directory"): ("transfer", {"name": "a", "incarnation": "0" * 32}),
    ("PUT", "/v1/directory/keep"): ("transfer", {"entries": [{"name": "a", "incarnation": "0" * 32}]}),
    ("DELETE", "/v1/directory/entries/{name}"): ("transfer", None),
    ("GET", "/v1/events"): ("read", None),
    ("GET", "/v1/events/recent"): ("read", None),
}


def endpoints_of(served: Served) -> set[tuple[str, str]]:
    document = DaemonApp(served.daemon).api.openapi()
    return {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}


async def test_each_endpoint_has_a_row(served: Served) -> None:
    assert endpoints_of(served) == set(ENDPOINTS)


async def status(served: Served, token: str | None, method: str, path: str, body: Any) -> tuple[int, str]:
    """Returns the status and the problem's code; of a stream, only the beginning is read."""
    path = path.replace("{", "").replace("}", "")
    async with served.tcp(token) as client, client.stream(method, path, json=body) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return answer.status_code, ""
        await answer.aread()
    assert answer.headers["x-content-type-options"] == "nosniff"
    kind = answer.headers.get("content-type")
    code = ""
    if answer.status_code >= 400 and path != "/readyz":
        assert kind == "application/problem+json", (path, answer.text)
        problem = answer.json()
        assert problem["status"] == answer.status_code
        assert set(problem) == {"type", "title", "status", "detail", "code", "instance"}
        code = problem["code"]
    return answer.status_code, code


async def test_every_endpoint_for_every_token(served: Served) -> None:
    tokens = {role: await served.make_token(role) for role in ROLES}
    expired = await served.make_token("admin", ttl_s=0.001)
    revoked = await served.make_token("admin")
    async with served.unix() as client:
        assert (await client.delete(f"/v1/tokens/{revoked.split('_')[1]}")).status_code == 200
    await asyncio.sleep(0.01)  # until the token ends: nothing else may permit the request
    nobody = {
        "none": None,
        "wrong": "kvx_0000000000000000_x",
        "cut": tokens["admin"][:-1],
        "longer": tokens["admin"] + "A",
        "of another's id": "_".join((*tokens["read"].split("_")[:2], *tokens["admin"].split("_")[2:])),
        "expired": expired,
        "revoked": revoked,
        "not of this form": "secret",
    }
    for (method, path), (role, body) in ENDPOINTS.items():
        for kind, token in nobody.items():
            found = await status(served, token, method, path, body)
            if role is None:
                assert found[0] in (200, 503), (method, path, kind, found)
            else:
                assert found == (401, "unauthorized"), (method, path, kind, found)
        for mine, token in tokens.items():
            found = await status(served, token, method, path, body)
            if role is not None and ROLES.index(mine) < ROLES.index(role):
                assert found == (403, "forbidden"), (method, path, mine, found)
            else:
                assert found[0] not in (401, 403), (method, path, mine, found)


async def test_a_role_that_is_too_low_is_told_before_the_body_is_read(served: Served) -> None:
    token = await served.make_token("read")
    async with served.tcp(token) as client:
        answer = await client.post("/v1/transfers", content=b"{not json")
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_the_sockets_owner_is_an_admin_and_a_token_is_less(served: Served) -> None:
    assert stat.S_IMODE(served.socket.stat().st_mode) == 0o600
    async with served.unix() as client:
        assert (await client.get("/v1/whoami")).json()["role"] == "admin"
    async with served.unix(await served.make_token("read")) as client:
        assert (await client.get("/v1/whoami")).json()["role"] == "read"
        assert (await client.get("/v1/tokens")).status_code == 403
    async with served.unix("wrong") as client:
        assert (await client.get("/v1/whoami")).status_code == 401


async def test_tenants_are_kept_apart(served: Served) -> None:
    token = await served.make_token("transfer", tenants=["red"])
    everybody = await served.make_token("transfer")
    async with served.tcp(token) as client, served.tcp(everybody) as other:
        pin = {**SALT, "layout": DIGEST}
        # There is no pool here: a permitted request is answered so.
        assert (await client.post("/v1/pages/pin", json={**pin, "tenant": "red"})).status_code == 404
        for tenant in ("", "blue", "Red"):
            answer = await client.post("/v1/pages/pin", json={**pin, "tenant": tenant})
            assert answer.status_code == 403, tenant
        park = {**SALT, "tenant": "red", "agent": "a", "region": "kv", "blocks": [1]}
        assert (await client.post("/v1/pages/park", json=park)).status_code == 403  # no lease
        lease = {"lease": "kvxfer-lease-1.4000000000000001"}
        assert (await client.post("/v1/pages/park", json={**park, **lease})).status_code == 404
        assert (await other.post("/v1/pages/park", json=park)).status_code == 404
        assert (await client.post("/v1/transfers", json=MOVE)).status_code == 403
        assert (await client.post("/v1/leases", json={"agent": "a", "region": "kv"})).status_code == 403
        assert (await client.post("/v1/agents/a/peers", json={"remote_agent": "b"})).status_code == 403


# What a token that is limited to tenants reaches: its pages and transfers, and what is of nobody.
OF_TENANTS = {
    *(("GET", path) for path in ("/healthz", "/readyz", "/v1/node", "/v1/settings", "/v1/drain")),
    *(("GET", path) for path in ("/v1/whoami", "/v1/transfers", "/v1/transfers/{transfer}")),
    *(("GET", path) for path in ("/v1/open-transfers", "/v1/request-trace", "/v1/request-trace/perfetto")),
    *(("GET", path) for path in ("/v1/pages", "/v1/pools", "/v1/events", "/v1/events/recent")),
    ("DELETE", "/v1/transfers/{transfer}"),
    ("POST", "/v1/transfers/{transfer}/cancel"),
    *(("POST", f"/v1/pages/{verb}") for verb in ("park", "lease", "lease/{lease}/extend")),
    *(("POST", f"/v1/pages/{verb}") for verb in ("pin", "unpin", "drop")),
    ("DELETE", "/v1/pages/lease/{lease}"),
}


async def test_a_tenants_token_reaches_only_what_is_of_its_tenant(served: Served) -> None:
    token = await served.make_token("admin", tenants=["red"])
    lease = {"tenant": "red", "lease": "kvxfer-lease-1.4000000000000001"}
    for (method, path), (role, body) in ENDPOINTS.items():
        if path.startswith("/v1/pages/") and body is not None and "keys" in body:
            body = body | (lease if path.endswith("park") else {"tenant": "red"})
        found = await status(served, token, method, path, body)
        is_open = role is None or (method, path) in OF_TENANTS
        assert (found == (403, "forbidden")) is not is_open, (method, path, found)


async def test_a_tenants_token_sees_nothing_of_others(served: Served) -> None:
    rates = {"red": 5, "blue": 6}
    async with served.unix() as client:
        await client.patch("/v1/settings", json={"page_quotas_nbytes": rates, "tenant_bytes_per_s": rates})
        await client.put("/v1/directory", json={"name": "a", "incarnation": "0" * 32})
        await client.put("/v1/drain", json={})
        await client.delete("/v1/drain")
    for tenant in ("red", "blue"):
        served.daemon.note("pages.dropped", {"tenant": tenant}, tenant)
    async with served.tcp(await served.make_token("read", tenants=["red"])) as client:
        settings = (await client.get("/v1/settings")).json()
        assert settings["page_quotas_nbytes"] == settings["tenant_bytes_per_s"] == {"red": 5}
        events = (await client.get("/v1/events/recent")).json()["items"]
    assert [(each["topic"], each["data"].get("tenant")) for each in events] == [
        *((f"drain.{what}", None) for what in ("begun", "ready", "ended")),
        ("pages.dropped", "red"),
    ]


async def test_tokens_that_have_expired_make_room(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.control.token_access.MAX_TOKENS", 4)  # the admin's is one
    of_certificate = {"name": "c", "certificate": "DNS:c"}
    now_s = [time.time()]
    served.daemon.access._clock = lambda: now_s[0]
    async with served.unix() as client:

        async def make(**more: object) -> int:
            return (await client.post("/v1/tokens", json={"name": "x", **more})).status_code

        assert await asyncio.gather(*(make(ttl_s=60.0) for _ in range(4))) == [201, 201, 201, 429]
        now_s[0] += 61.0
        assert [await make(ttl_s=60.0, **of_certificate) for _ in range(2)] == [201, 409]
        now_s[0] += 61.0
        assert await make(**of_certificate) == 201
        listed = (await client.get("/v1/tokens")).json()["items"]
    assert [token["name"] for token in listed] == ["admin", "c"]
    kept: dict[str, Any] = served.daemon.store.load("token")
    assert {token["id"] for token in listed} == set(kept)


async def test_a_tenants_admin_changes_nothing_of_all(served: Served) -> None:
    token = await served.make_token("admin", tenants=["red"])
    async with served.tcp(token) as client:
        for method, path, body in (
            ("POST", "/v1/tokens", {"name": "x", "role": "admin"}),
            ("GET", "/v1/tokens", None),
            ("PUT", "/v1/drain", {}),
            ("DELETE", "/v1/drain", None),
            ("PATCH", "/v1/settings", {"log_level": "debug"}),
        ):
            assert (await client.request(method, path, json=body)).status_code == 403, path


async def test_secrets_are_kept_as_hashes_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        secret = await served.make_token("read")
        admin = served.token
        async with served.tcp(admin) as client:
            listed = (await client.get("/v1/tokens")).text
    assert secret not in listed
    assert "digest" not in listed
    file = tmp_path / "state/admin.token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for path in (tmp_path / "state").iterdir():
        if path != file:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            for each in (secret, admin):
                assert each.split("_", 2)[2].encode() not in path.read_bytes(), path


async def test_tokens_outlive_a_restart_and_so_does_their_revocation(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        first, second = await served.make_token("read"), await served.make_token("transfer")
        async with served.unix() as client:
            await client.delete(f"/v1/tokens/{first.split('_')[1]}")
    async with serving(tmp_path) as served:
        assert not any("token is in" in words for words in served.said)
        for token, expected in ((first, 401), (second, 200), (served.token, 200)):
            async with served.tcp(token) as client:
                assert (await client.get("/v1/whoami")).status_code == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "evil.example:80@127.0.0.1"}, 200),  # its host is 127.0.0.1 for every reader
        ({"Host": "[::1"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://{own}"}, 403),
        ({"Origin": "http://{own}"}, 200),
        ({"Origin": "http://localhost"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
async def test_other_origins_are_refused(served: Served, headers: dict[str, str], expected: int) -> None:
    own = served.url.removeprefix("http://")
    headers = {name: value.replace("{own}", own) for name, value in headers.items()}
    async with served.tcp(served.token) as client:
        assert (await client.get("/v1/node", headers=headers)).status_code == expected
        assert (await client.put("/v1/drain", json={}, headers=headers)).status_code == expected


async def test_a_token_that_was_drawn_elsewhere_holds_while_the_daemon_is_started_with_it(
    tmp_path: Path,
) -> None:
    secret = f"kvx_{'5a' * 8}_{'x' * 43}"
    file = tmp_path / "prometheus"
    file.write_text(f"{secret}\n")
    async with serving(tmp_path, tokens=(("read", file),)) as served:
        assert served.token  # the first admin's token, as before
        async with served.tcp(secret) as client:
            assert (await client.get("/metrics")).status_code == 200
            refused = await client.put("/v1/drain", json={})
            assert refused.status_code == 403
            words = "PUT /v1/drain needs the role admin, and the token named 'prometheus' has read"
            assert refused.json()["detail"] == words
        async with served.unix() as client:
            shown = (await client.get("/v1/tokens")).json()["items"]
            assert [(each["name"], each["role"]) for each in shown if each["id"] == "5a" * 8] == [
                ("prometheus", "read")
            ]
            refused = await client.delete(f"/v1/tokens/{'5a' * 8}")
            assert refused.status_code == 409
            assert refused.json()["detail"] == (
                f"this token comes from '--token read={file}': restart the daemon without that option"
            )
    async with serving(tmp_path) as served, served.tcp(secret) as client:
        assert (await client.get("/metrics")).status_code == 401
