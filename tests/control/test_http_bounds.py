"""Clients that are slow, large, odd or many; and addresses that must not be dialled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvxfer.control import http_protocol
from kvxfer.control.app import guard
from tests.control.records import attached, record
from tests.control.serving import BOUND_S, Served, serving
from tests.control.test_access import DIGEST, MOVE, SALT


@asynccontextmanager
async def raw(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which anything can be sent."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(served: Served, method: str = "GET", path: str = "/v1/node", *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {served.token}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def all_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(BOUND_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET", b"GET /v1/node HTTP/1.1\r\nHost: localhost\r\nX: ", b"\x16\x03\x01\x02\x00"],
    ids=["nothing", "a verb", "headers", "TLS"],
)
async def test_half_open_requests_end_in_time_and_hold_nobody_up(
    served: Served, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "REQUEST_TIMEOUT_S", 2.0)

    async def half() -> None:
        async with raw(served) as (reader, writer):
            writer.write(sent)
            answer = await all_of(reader)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400")

    clients = [asyncio.create_task(half()) for _ in range(100)]
    async with served.tcp(served.token) as client:
        for _ in range(20):
            assert (await client.get("/v1/node")).status_code == 200
    await asyncio.gather(*clients)


async def test_a_second_request_that_does_not_come_whole_ends_in_time_too(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "REQUEST_TIMEOUT_S", 2.0)
    async with raw(served) as (reader, writer):
        writer.write(head(served))
        await reader.readuntil(b"}")
        writer.write(b"GET /v1/no")
        assert await all_of(reader) == b""


async def test_a_body_that_does_not_come_ends_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_BODY_TIMEOUT_S", 0.3)
    async with raw(served) as (reader, writer):
        writer.write(head(served, "PUT", "/v1/drain", "Content-Type: application/json", "Content-Length: 9"))
        writer.write(b"{")
        answer = await reader.readuntil(b'"code"')
        assert answer.startswith(b"HTTP/1.1 504")


async def test_who_is_refused_reads_why_though_the_body_comes_later(served: Served) -> None:
    async with raw(served) as (reader, writer):
        asked = head(served, "PUT", "/v1/drain", "Content-Type: application/json", "Content-Length: 2")
        writer.write(asked.replace(served.token.encode(), b"kvxfer-wrong"))
        await asyncio.sleep(0.05)
        # It waits for the body: if it had answered and closed, these bytes would cause a reset.
        assert not reader.at_eof()
        writer.write(b"{}")
        async with asyncio.timeout(BOUND_S):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401")
        assert b"unauthorized" in answer


async def test_who_is_refused_waits_for_no_body_without_end(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_PASSED_OVER_TIMEOUT_S", 0.1)
    async with raw(served) as (reader, writer):
        asked = head(served, "PUT", "/v1/drain", "Content-Type: application/json", "Content-Length: 2")
        writer.write(asked.replace(served.token.encode(), b"kvxfer-wrong"))
        assert (await all_of(reader)).startswith(b"HTTP/1.1 401")


async def test_too_many_connections_are_closed_and_the_unix_socket_is_there_still(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MOST_CONNECTIONS", 50)
    held = []
    for _ in range(80):
        context = raw(served)
        held.append((context, await context.__aenter__()))
    async with served.unix() as client:
        assert (await client.get("/v1/node")).status_code == 200
    ends = [asyncio.create_task(all_of(reader)) for _, (reader, _) in held]
    first = asyncio.as_completed(ends, timeout=BOUND_S)
    assert [await end for end in itertools.islice(first, 30)] == [b""] * 30
    for end in ends:
        end.cancel()
    await asyncio.wait(ends)
    for context, _ in held:
        await context.__aexit__(None, None, None)


async def test_an_answer_that_nobody_takes_ends_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_STALL_TIMEOUT_S", 0.5)
    for number in range(60_000):
        served.daemon.events.append("test", 1.0, {"number": number, "long": "x" * 100})
    async with raw(served) as (_, writer):
        writer.write(head(served, "GET", "/v1/events?after=0"))
        async with asyncio.timeout(BOUND_S), served.unix() as client:
            seen = False
            while True:
                open_ = "kvxfer_daemon_watchers 1.0" in (await client.get("/metrics")).text
                if seen and not open_:
                    break
                seen = seen or open_
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("is_told", [True, False])
async def test_bodies_are_bounded(served: Served, is_told: bool) -> None:
    body = b"[" + b"1," * guard.MAX_BODY_NBYTES

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 65536):
            yield body[at : at + 65536]

    async with served.tcp(served.token) as client:
        try:
            answer = await client.post("/v1/transfers", content=body if is_told else chunks())
        except httpx.TransportError:
            return  # it had answered and closed
        assert (answer.status_code, answer.json()["code"]) == (413, "too-large")
        assert (await client.get("/v1/node")).status_code == 200


async def test_the_largest_request_is_taken(served: Served) -> None:
    blocks = list(range(2**40 - 65536, 2**40))
    async with served.unix() as client:
        answer = await client.post("/v1/transfers", json={**MOVE, "src_blocks": blocks, "dst_blocks": blocks})
        assert answer.json()["code"] == "not-found"
        more = {**MOVE, "src_blocks": [*blocks, 1], "dst_blocks": [*blocks, 1]}
        assert (await client.post("/v1/transfers", json=more)).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"\\ud800"',
        b'{"name": "\\ud800"}',
        b'{"name": "a\\u0000b"}',
        b'{"name": ""}',
        b'{"name": 1}',
        b'{"name": "x", "role": "root"}',
        b'{"name": "x", "ttl_s": NaN}',
        b'{"name": "x", "ttl_s": Infinity}',
        b'{"name": "x", "ttl_s": "5"}',
        b'{"name": "x", "ttl_s": true}',
        b'{"name": "x", "tenants": []}',
        b'{"name": "x", "more": 1}',
        b'{"name": "' + b"x" * 129 + b'"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b"1" * 5000,
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
async def test_what_is_no_request_is_refused_in_words(served: Served, body: bytes) -> None:
    async with served.unix() as client:
        answer = await client.post("/v1/tokens", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422), answer.text
        assert answer.json()["code"] == "invalid-argument"
        assert len((await client.get("/v1/tokens")).json()["items"]) == 1


async def test_odd_requests_are_refused(served: Served) -> None:
    for sent in (
        b"GET /v1/node HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        head(served, "GET", "/v1/node", "Authorization: Bearer x"),
        head(served, "GET", "/v1/node", "Content-Length: -1"),
        head(served, "GET", "/v1/node", "Content-Length: 1", "Transfer-Encoding: chunked"),
        head(served, "GET", "/v1/node", "X: " + "y" * 100_000),
        head(served, "GET", "/v1/node", "X : y"),
        head(served, "GET", "/v1/node", "X: a\x00b"),
        b"GET /v1/node\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://evil.example/v1/node HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\r\n" * 10_000,
    ):
        async with raw(served) as (reader, writer):
            writer.write(sent)
            writer.write_eof()
            answer = await all_of(reader)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), (sent[:80], answer[:200])
    async with served.tcp(served.token) as client:
        assert (await client.get("/v1/node")).status_code == 200


async def test_no_path_leads_out_of_the_page(served: Served, tmp_path: Path) -> None:
    (tmp_path / "state/secret.html").write_text("secret")
    up = "../" * 12
    for path in (
        f"/{up}etc/passwd",
        f"/..%2f{up}etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        f"/{up}{tmp_path}/state/secret.html",
        "/..\\..\\etc\\passwd",
        "/index.html%00",
        "/%00",
        "/__init__.py",
        "/v1/../page/index.html",
        "/v1/agents/..%2f..%2fetc%2fpasswd",
        "/v1/agents/%2e%2e",
        "/v1/tokens/" + "x" * 500,
        "/v1/transfers/%ff%fe",
        "/v1//node",
        "/V1/node",
        "/metrics/",
    ):
        async with raw(served) as (reader, writer):
            writer.write(head(served, "GET", path, "Connection: close"))
            answer = await all_of(reader)
        status = answer[9:12]
        assert status in (b"404", b"405", b"422", b"400"), (path, answer[:300])
        assert b"root:" not in answer


async def test_health_needs_no_token_and_tells_nothing(served: Served) -> None:
    async with served.tcp() as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/readyz")).json() == {"ready": True, "reasons": []}
        assert (await client.get("/v1/openapi.json")).status_code == 200
        for path in ("/v1/node", "/metrics", "/v1/nothing", "/v1/"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.post("/healthz")).status_code == 401
        assert (await client.get("/nothing")).json()["code"] == "not-found"


async def test_methods_that_are_not_there_say_which_are(served: Served) -> None:
    async with served.unix() as client:
        answer = await client.patch("/v1/node")
        assert (answer.status_code, answer.json()["code"]) == (405, "method-not-allowed")
        assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("tcp://8.8.8.8:1", "forbidden"),
        ("tcp://169.254.169.254:80", "forbidden"),
        ("tcp://[fe80::1]:80", "forbidden"),
        ("tcp://[::ffff:8.8.8.8]:1", "forbidden"),
        ("tcp://[2001:db8::1]:1", "forbidden"),
        ("tcp://0.0.0.0:1", "forbidden"),
        ("tcp://134744072:1", "forbidden"),
        ("tcp://0x08080808:1", "forbidden"),
        ("tcp://010.8.8.8:1", "forbidden"),
        ("tcp://evil.example:1", "forbidden"),
        ("tcp://127.0.0.1.evil.example:1", "forbidden"),
        ("tcp://user@127.0.0.1:1", "forbidden"),
        ("tcp://127.0.0.1:1/path", "forbidden"),
        ("tcp://127.0.0.1", "forbidden"),
        ("http://127.0.0.1:1", "forbidden"),
        ("file:///etc/passwd", "forbidden"),
        ("TCP://8.8.8.8:1", "forbidden"),
        ("unix:///run/x", "forbidden"),
    ],
)
async def test_no_address_is_dialled_that_is_not_allowed(served: Served, address: str, code: str) -> None:
    served.daemon.attachments.agents["a" * 32] = attached("a" * 32, "a")
    async with served.unix() as client:
        dialled = {"remote_agent": address}
        for path, asked in (
            ("/v1/transfers", {**MOVE, "agent": "a" * 32, **dialled}),
            (f"/v1/agents/{'a' * 32}/peers", dialled),
        ):
            answer = await client.post(path, json=asked)
            assert answer.json()["code"] == code, answer.text
    served.daemon.attachments.agents.clear()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 415),
        ("", 415),
        ("application/x-www-form-urlencoded", 415),
        ("text/json", 415),
        ("application/jsonp", 415),
        ("application/xml; note=application/json", 415),
        ("application/json", 201),
        ("Application/JSON; charset=utf-8", 201),
        ("application/vnd.kvxfer+json", 201),
    ],
)
async def test_a_body_that_is_not_said_to_be_json_is_told_so(
    served: Served, kind: str | None, status: int
) -> None:
    async with served.unix() as client:
        headers = {} if kind is None else {"Content-Type": kind}
        answer = await client.post("/v1/tokens", content=b'{"name": "x"}', headers=headers)
        assert answer.status_code == status, answer.text
        if status == 415:
            assert answer.json()["code"] == "unsupported-media-type"
            assert "Content-Type: application/json" in answer.json()["detail"]
        # If the body is missing, that is the error.
        assert (await client.post("/v1/tokens", headers=headers)).status_code == 422


async def test_rates_are_bounded_for_each_caller(tmp_path: Path) -> None:
    async with serving(tmp_path, rate=0.001, burst=5.0) as served:
        token = await served.make_token("read")
        async with served.tcp(token) as client, served.tcp() as nobody, served.unix() as admin:
            for _ in range(5):
                assert (await client.get("/v1/node")).status_code == 200
                assert (await nobody.get("/healthz")).status_code == 200
            for each in (client, nobody):
                answer = await each.get("/healthz")
                assert (answer.status_code, answer.json()["code"]) == (429, "rate-limited")
                assert int(answer.headers["retry-after"]) >= 1
            assert (await admin.get("/v1/node")).status_code == 200


async def test_a_hundred_thousand_records_are_listed_by_cursor(served: Served) -> None:
    agent = attached("a" * 32, "a", peers=[{"session": 1, "incarnation": "b" * 32, "name": "b"}])
    for begin in range(0, 100_000, 1000):
        served.daemon.intake.records(
            agent, [record(transfer=begin + n, context=f"r{begin + n}") for n in range(1000)]
        )
        await asyncio.sleep(0)
    seen: list[str] = []
    cursor = ""
    async with served.unix() as client:
        while True:
            page = (await client.get("/v1/transfers", params={"cursor": cursor, "limit": 250})).json()
            seen += [item["id"] for item in page["items"]]
            if page["next"] is None:
                break
            cursor = page["next"]
        assert len(seen) == len(set(seen)) == 100_000
        one = (await client.get("/v1/transfers", params={"context": "r77777"})).json()["items"]
        assert [item["id"] for item in one] == [f"{'a' * 16}-{'b' * 16}-77777"]
        nothing = (await client.get("/v1/transfers", params={"agent": "nobody"})).json()
        assert nothing["items"] == []
        assert nothing["next"] is not None


async def test_pages_want_a_pool(served: Served) -> None:
    async with served.unix() as client:
        answer = await client.post("/v1/pages/pin", json={**SALT, "layout": DIGEST})
        assert (answer.status_code, answer.json()["code"]) == (404, "not-found")
        assert (await client.get("/v1/pools")).json()["items"] == []
