"""Permissions: each verb, with each role, kind of token and tenant, at a daemon on real sockets."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.control.app.build import DaemonApp
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.tokens import ROLES
from kvxfer.control.state.transfer_table import Made
from tests.control.serving import DIGEST, MOVE, SALT, Served, serving

PAGES = {**SALT, "layout": DIGEST, "tenant": "red"}
LEASE = "kvxfer-lease-1.4000000000000001"
PARK = {**SALT, "tenant": "red", "agent": "a", "region": "kv", "blocks": [1]}

# Each verb, the role that it needs (None: no role), whether a token of the tenant red may use it, and a
# request of that tenant that passes its schema.
ENDPOINTS: dict[tuple[str, str], tuple[str | None, bool, Any]] = {
    ("GET", "/healthz"): (None, True, None),
    ("GET", "/readyz"): (None, True, None),
    ("GET", "/metrics"): ("read", False, None),
    ("GET", "/v1/node"): ("read", True, None),
    ("GET", "/v1/topology"): ("read", False, None),
    ("GET", "/v1/doctor"): ("read", False, None),
    ("GET", "/v1/settings"): ("read", True, None),
    ("PATCH", "/v1/settings"): ("admin", False, {}),
    ("GET", "/v1/drain"): ("read", True, None),
    ("PUT", "/v1/drain"): ("admin", False, {}),
    ("DELETE", "/v1/drain"): ("admin", False, None),
    ("GET", "/v1/agents"): ("read", False, None),
    ("GET", "/v1/agents/{agent}"): ("read", False, None),
    ("GET", "/v1/agents/{agent}/regions"): ("read", False, None),
    ("GET", "/v1/agents/{agent}/peers"): ("read", False, None),
    ("POST", "/v1/agents/{agent}/peers"): ("transfer", False, {"remote_agent": "b"}),
    ("GET", "/v1/regions"): ("read", False, None),
    ("GET", "/v1/peers"): ("read", False, None),
    ("GET", "/v1/rails"): ("read", False, None),
    ("POST", "/v1/transfers"): ("transfer", False, MOVE),
    ("GET", "/v1/transfers"): ("read", True, None),
    ("GET", "/v1/open-transfers"): ("read", True, None),
    ("GET", "/v1/transfers/{transfer}"): ("read", True, None),
    ("DELETE", "/v1/transfers/{transfer}"): ("transfer", True, None),
    ("POST", "/v1/transfers/{transfer}/cancel"): ("transfer", True, None),
    ("GET", "/v1/request-trace"): ("read", True, None),
    ("GET", "/v1/request-trace/perfetto"): ("read", True, None),
    ("POST", "/v1/traces"): ("transfer", False, {}),
    ("GET", "/v1/leases"): ("read", False, None),
    ("POST", "/v1/leases"): ("transfer", False, {"agent": "a", "region": "kv"}),
    ("POST", "/v1/leases/{lease}/extend"): ("transfer", False, {"ttl_s": 1.0}),
    ("DELETE", "/v1/leases/{lease}"): ("transfer", False, None),
    ("GET", "/v1/pages"): ("read", True, None),
    ("POST", "/v1/pages/park"): ("transfer", True, PARK | {"lease": LEASE}),
    ("POST", "/v1/pages/fetch"): ("transfer", False, PARK | PAGES),
    ("POST", "/v1/pages/lease"): ("transfer", True, PAGES),
    ("POST", "/v1/pages/lease/{lease}/extend"): ("transfer", True, {"ttl_s": 1.0}),
    ("DELETE", "/v1/pages/lease/{lease}"): ("transfer", True, None),
    ("POST", "/v1/pages/pin"): ("transfer", True, PAGES),
    ("POST", "/v1/pages/unpin"): ("transfer", True, PAGES),
    ("POST", "/v1/pages/drop"): ("transfer", True, PAGES),
    ("GET", "/v1/pools"): ("read", True, None),
    ("GET", "/v1/whoami"): ("read", True, None),
    ("GET", "/v1/tokens"): ("admin", False, None),
    ("POST", "/v1/tokens"): ("admin", False, {"name": "x"}),
    ("DELETE", "/v1/tokens/{token}"): ("admin", False, None),
    ("GET", "/v1/directory"): ("read", False, None),
    ("PUT", "/v1/directory"): ("transfer", False, {"name": "a", "incarnation": "0" * 32}),
    ("PUT", "/v1/directory/keep"): ("transfer", False, {"entries": [{"name": "a", "incarnation": "0" * 32}]}),
    ("DELETE", "/v1/directory/entries/{name}"): ("transfer", False, None),
    ("GET", "/v1/events"): ("read", True, None),
    ("GET", "/v1/events/recent"): ("read", True, None),
}
# Neither GETs nor changes: they keep something going.
KEEP = {"/v1/directory/keep", "/v1/traces"}


async def test_each_endpoint_has_a_row(served: Served) -> None:
    paths: dict[str, dict[str, Any]] = DaemonApp(served.daemon).api.openapi()["paths"]
    assert {(method.upper(), path) for path, verbs in paths.items() for method in verbs} == set(ENDPOINTS)


async def status(served: Served, token: str | None, method: str, path: str, body: Any) -> tuple[int, str]:
    """Returns the status and the problem's code; of a stream, only the beginning is read."""
    path = path.replace("{", "").replace("}", "")
    async with served.tcp(token) as client, client.stream(method, path, json=body) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return answer.status_code, ""
        await answer.aread()
    assert answer.headers["x-content-type-options"] == "nosniff"
    if answer.status_code < 400 or path == "/readyz":
        return answer.status_code, ""
    assert answer.headers["content-type"] == "application/problem+json", (path, answer.text)
    problem = answer.json()
    assert problem["status"] == answer.status_code
    assert set(problem) == {"type", "title", "status", "detail", "code", "instance"}
    return answer.status_code, problem["code"]


async def test_every_verb_for_every_token(served: Served) -> None:
    tokens = {role: await served.make_token(role) for role in ROLES}
    of_red = await served.make_token("admin", tenants=["red"])
    expired = await served.make_token("admin", ttl_s=60.0)
    revoked = await served.make_token("admin")
    async with served.unix() as client:
        assert (await client.delete(f"/v1/tokens/{revoked.split('_')[1]}")).status_code == 200
    served.daemon.tokens._clock = lambda: time.time() + 61.0
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
    for (method, path), (role, is_of_tenants, body) in ENDPOINTS.items():
        for kind, token in nobody.items():
            found = await status(served, token, method, path, body)
            if role is None:
                assert found[0] in (200, 503), (method, path, kind, found)
            else:
                assert found == (401, "unauthorized"), (method, path, kind, found)
        for mine, token in {**tokens, "of red": of_red}.items():
            found = await status(served, token, method, path, body)
            rank = ROLES.index("admin" if mine == "of red" else mine)
            is_permitted = role is None or rank >= ROLES.index(role)
            if is_permitted and (mine != "of red" or is_of_tenants):
                assert found[0] not in (401, 403), (method, path, mine, found)
            else:
                assert found == (403, "forbidden"), (method, path, mine, found)


async def test_each_change_is_one_line_of_the_log(served: Served, tmp_path: Path) -> None:
    def audit() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "state/audit.log").read_text().splitlines()]

    reader = await served.make_token("read")
    before = len(audit())
    expected = []
    changes = [(*verb, row[2]) for verb, row in ENDPOINTS.items() if verb[0] != "GET" and verb[1] not in KEEP]
    for token, verbs in ((served.token, [*changes, ("DELETE", "/v1/drain", None)]), (reader, changes[:3])):
        for method, path, body in verbs:
            found, code = await status(served, token, method, path, body)
            expected.append((path.replace("{", "").replace("}", ""), "done" if found < 300 else code))
    async with served.tcp(served.token) as client:
        await client.get("/v1/tokens")
        await client.put("/v1/drain", content=b"no json")
    lines = audit()[before:]
    assert [(line["path"], line["result"]) for line in lines] == expected
    assert all({"at_s", "who", "name", "what", "from"} <= line.keys() for line in lines)
    assert lines[-1]["who"] == f"token:{reader.split('_')[1]}"
    text = (tmp_path / "state/audit.log").read_text()
    assert reader not in text
    assert served.token not in text


async def test_without_room_for_its_line_no_change_is_made(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(need: str) -> None:
        raise Refusal("unavailable", "no room")

    monkeypatch.setattr(served.daemon.audit, "require_room", full)
    for (method, path), (_, _, body) in ENDPOINTS.items():
        found = await status(served, served.token, method, path, body)
        if method != "GET" and path not in KEEP:
            assert found == (503, "unavailable"), path
        else:
            # 415 and 422: the body here is not protobuf, and names no request.
            assert found[0] in (200, 404, 415, 422), path


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
    red, everybody = await served.make_token("transfer", tenants=["red"]), await served.make_token("transfer")
    # There is no pool here, and no agent: a permitted request is answered so.
    for path, body, of_red, of_everybody in (
        *(("pages/pin", {**PAGES, "tenant": tenant}, 403, 404) for tenant in ("", "blue", "Red")),
        ("pages/pin", PAGES, 404, 404),
        ("pages/park", PARK, 403, 404),  # it needs a lease of the tenant's own
        ("pages/park", {**PARK, "lease": LEASE}, 404, 404),
        ("transfers", MOVE, 403, 404),
        ("leases", {"agent": "a", "region": "kv"}, 403, 404),
        ("agents/a/peers", {"remote_agent": "b"}, 403, 404),
    ):
        for token, expected in ((red, of_red), (everybody, of_everybody)):
            found = await status(served, token, "POST", f"/v1/{path}", body)
            assert found[0] == expected, (path, body, found)


async def test_a_tenants_token_sees_nothing_of_others(served: Served) -> None:
    rates = {"red": 5, "blue": 6}
    async with served.unix() as client:
        await client.patch("/v1/settings", json={"page_quotas_nbytes": rates, "tenant_bytes_per_s": rates})
        await client.put("/v1/directory", json={"name": "a", "incarnation": "0" * 32})
        await client.put("/v1/drain", json={})
        await client.delete("/v1/drain")
    for handle, tenant in enumerate(("red", "blue", "")):
        served.daemon.table.add_made(Made("a" * 32, handle, "me", "k", tenant, "", 0, 1, 9.0), 1.0)
    ids = [Made("a" * 32, handle, "me", "k", "", "", 0, 1, 9.0).id for handle in range(3)]
    for tenant in ("red", "blue"):
        served.daemon.note("pages.dropped", {"tenant": tenant}, tenant)
    async with served.tcp(await served.make_token("read", tenants=["red"])) as client:
        settings = (await client.get("/v1/settings")).json()
        assert settings["page_quotas_nbytes"] == settings["tenant_bytes_per_s"] == {"red": 5}
        events = (await client.get("/v1/events/recent")).json()["items"]
        assert [each["id"] for each in (await client.get("/v1/transfers")).json()["items"]] == ids[:1]
        found = [(await client.get(f"/v1/transfers/{each}")).status_code for each in ids]
        assert found == [200, 404, 404]
    assert [(each["topic"], each["data"].get("tenant")) for each in events] == [
        *((f"drain.{what}", None) for what in ("begun", "ready", "ended")),
        ("pages.dropped", "red"),
    ]


async def test_tokens_that_have_expired_make_room(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.control.daemon.durable_tokens.MAX_TOKENS", 4)  # the admin's is one
    of_certificate = {"name": "c", "certificate": "DNS:c"}
    now_s = [time.time()]
    served.daemon.tokens._clock = lambda: now_s[0]
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


async def test_other_origins_are_refused(served: Served) -> None:
    own = served.url.removeprefix("http://")
    for name, value, expected in (
        ("Host", "localhost", 200),
        ("Host", "evil.example", 403),
        ("Host", "127.0.0.1.evil.example", 403),
        ("Host", "evil.example:80@127.0.0.1", 200),  # its host is 127.0.0.1 for every reader
        ("Host", "[::1", 403),
        ("Host", "", 403),
        ("Origin", "http://evil.example", 403),
        ("Origin", "null", 403),
        ("Origin", f"https://{own}", 403),
        ("Origin", f"http://{own}", 200),
        ("Origin", "http://localhost", 403),
        ("Sec-Fetch-Site", "cross-site", 403),
        ("Sec-Fetch-Site", "same-site", 403),
        ("Sec-Fetch-Site", "same-origin", 200),
    ):
        async with served.tcp(served.token) as client:
            for method, body in (("GET", None), ("PUT", {})):
                answer = await client.request(method, "/v1/drain", json=body, headers={name: value})
                assert answer.status_code == expected, (name, value)


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
            assert (refused.status_code, "'prometheus'" in refused.json()["detail"]) == (403, True)
        async with served.unix() as client:
            shown = (await client.get("/v1/tokens")).json()["items"]
            assert [(each["name"], each["role"]) for each in shown if each["id"] == "5a" * 8] == [
                ("prometheus", "read")
            ]
            refused = await client.delete(f"/v1/tokens/{'5a' * 8}")
            assert (refused.status_code, f"--token read={file}" in refused.json()["detail"]) == (409, True)
    async with serving(tmp_path) as served, served.tcp(secret) as client:
        assert (await client.get("/metrics")).status_code == 401
