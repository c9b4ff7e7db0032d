"""Clients that are slow, large, odd or many; and addresses that must not be dialled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvxfer.control.app import guard
from kvxfer.control.http import http_protocol
from tests.control.records import attached, record
from tests.control.serving import BOUND_S, MOVE, Served, serving


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


async def test_half_open_requests_end_in_time_and_hold_nobody_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = head(served)

    async def is_answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(whole)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")

    async def half(sent: bytes) -> None:
        async with raw(served) as (reader, writer):
            writer.write(sent)
            answer = await all_of(reader)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400")

    async def half_a_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /v1/no")
        async with asyncio.timeout(BOUND_S / 2):  # an idle connection would end after 60 s
            assert await all_of(reader) == b""

    async with AsyncExitStack() as stack:
        other, *known = [await stack.enter_async_context(raw(served)) for _ in range(51)]
        for client in (other, *known):
            await is_answered(*client)
        # Now, so that a first request may take longer to arrive.
        monkeypatch.setattr(http_protocol, "REQUEST_TIMEOUT_S", 2.0)
        begun = (b"", b"GET", whole[:-2] + b"X: ", b"\x16\x03\x01\x02\x00")
        clients = [asyncio.create_task(half(sent)) for sent in begun for _ in range(50)]
        clients += [asyncio.create_task(half_a_second(*client)) for client in known]
        for _ in range(20):
            await is_answered(*other)
        await asyncio.gather(*clients)


async def test_a_body_that_does_not_come_ends_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_BODY_TIMEOUT_S", 0.3)
    async with raw(served) as (reader, writer):
        writer.write(head(served, "PUT", "/v1/drain", "Content-Type: application/json", "Content-Length: 9"))
        writer.write(b"{")
        answer = await reader.readuntil(b'"code"')
        assert answer.startswith(b"HTTP/1.1 504")


@pytest.mark.parametrize("comes", [True, False])
async def test_who_is_refused_reads_why_though_the_body_comes_later_or_never(
    served: Served, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setattr(guard, "_PASSED_OVER_TIMEOUT_S", BOUND_S if comes else 0.1)
    async with raw(served) as (reader, writer):
        asked = head(served, "PUT", "/v1/drain", "Content-Type: application/json", "Content-Length: 2")
        writer.write(asked.replace(served.token.encode(), b"kvxfer-wrong"))
        if comes:
            await asyncio.sleep(0.05)
            # It waits for the body: if it had answered and closed, these bytes would cause a reset.
            assert not reader.at_eof()
            writer.write(b"{}")
        answer = await all_of(reader)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"unauthorized" in answer


async def test_too_many_connections_are_closed_and_the_unix_socket_is_there_still(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MOST_CONNECTIONS", 50)
    async with AsyncExitStack() as stack, served.unix() as client:
        held = [await stack.enter_async_context(raw(served)) for _ in range(80)]
        assert (await client.get("/v1/node")).status_code == 200
        ends = [asyncio.create_task(all_of(reader)) for reader, _ in held]
        first = asyncio.as_completed(ends, timeout=BOUND_S)
        assert [await end for end in itertools.islice(first, 30)] == [b""] * 30
        for end in ends:
            end.cancel()
        await asyncio.wait(ends)


async def test_an_answer_that_nobody_takes_ends_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_STALL_TIMEOUT_S", 0.5)
    for number in range(60_000):
        served.daemon.events.append("test", 1.0, {"number": number, "long": "x" * 100})
    async with raw(served) as (reader, writer):
        writer.write(head(served, "GET", "/v1/events?after=0"))
        await reader.readuntil(b"event: test")  # the stream is open
        await served.until_watched(0)


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


NO_REQUESTS = (
    *(b"", b"{", b"null", b"[]", b"\xff\xfe", b"1" * 5000, b"[" * 100_000, b'{"a":' * 100_000),
    *(b'"\\ud800"', b'{"name": "\\ud800"}', b'{"name": "a\\u0000b"}', b'{"name": ""}', b'{"name": 1}'),
    *(b'{"name": "x", "ttl_s": %s}' % value for value in (b"NaN", b"Infinity", b'"5"', b"true")),
    *(b'{"name": "x", %s}' % more for more in (b'"role": "root"', b'"tenants": []', b'"more": 1')),
    b'{"name": "' + b"x" * 129 + b'"}',
)


async def test_what_is_no_request_is_refused(served: Served) -> None:
    headers = {"Content-Type": "application/json"}
    async with served.unix() as client:
        for body in NO_REQUESTS:
            answer = await client.post("/v1/tokens", content=body, headers=headers)
            assert answer.status_code in (400, 422), (body[:24], answer.text)
            assert answer.json()["code"] == "invalid-argument"
        assert len((await client.get("/v1/tokens")).json()["items"]) == 1


async def test_odd_requests_are_refused(served: Served) -> None:
    for sent in (
        b"GET /v1/node HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        # Either of the two alone is right.
        head(served, "GET", "/v1/node", f"Authorization: Bearer {served.token}"),
        head(served, "GET", "/v1/node", *("Origin: http://localhost",) * 2),
        head(served, "GET", "/v1/node", *("Idempotency-Key: k",) * 2),
        head(served, "GET", "/v1/node", "Content-Length: -1"),
        head(served, "GET", "/v1/node", "Content-Length: 1", "Transfer-Encoding: chunked"),
        head(served, "GET", "/v1/node", "X: " + "y" * 1_000_000),
        head(served, "GET", "/v1/node", "X : y"),
        head(served, "GET", "/v1/node", "X: a\x00b"),
        b"GET /v1/node\r\n\r\n",
        b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://evil.example/v1/node HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\r\n" * 10_000,
    ):
        async with raw(served) as (reader, writer), asyncio.timeout(BOUND_S):
            writer.write(sent)
            try:
                answer = await reader.readline()
            except ConnectionError:
                answer = b""
            # What is long may arrive when it has been answered already, which resets the connection.
            is_reset = answer == b"" and len(sent) > 10_000
            assert answer.startswith(b"HTTP/1.1 4") or is_reset, (sent[:80], sent[-80:], answer)
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


FORBIDDEN = (
    *("tcp://8.8.8.8:1", "tcp://169.254.169.254:80", "tcp://[fe80::1]:80", "tcp://[::ffff:8.8.8.8]:1"),
    *("tcp://[2001:db8::1]:1", "tcp://0.0.0.0:1", "tcp://134744072:1", "tcp://0x08080808:1"),
    *("tcp://010.8.8.8:1", "tcp://evil.example:1", "tcp://127.0.0.1.evil.example:1"),
    *("tcp://user@127.0.0.1:1", "tcp://127.0.0.1:1/path", "tcp://127.0.0.1", "http://127.0.0.1:1"),
    *("file:///etc/passwd", "TCP://8.8.8.8:1", "unix:///run/x"),
)


async def test_no_address_is_dialled_that_is_not_allowed(served: Served) -> None:
    agent = "a" * 32
    served.daemon.links.agents[agent] = attached(agent, "a")
    async with served.unix() as client:
        for address in FORBIDDEN:
            dialled = {"remote_agent": address}
            for path, asked in (
                ("/v1/transfers", {**MOVE, "agent": agent, **dialled}),
                (f"/v1/agents/{agent}/peers", dialled),
            ):
                answer = await client.post(path, json=asked)
                assert answer.json()["code"] == "forbidden", (address, answer.text)
    served.daemon.links.agents.clear()


async def test_a_body_that_is_not_said_to_be_json_is_told_so(served: Served) -> None:
    async with served.unix() as client:
        for kind, status in (
            (None, 415),
            ("", 415),
            ("application/x-www-form-urlencoded", 415),
            ("text/json", 415),
            ("application/jsonp", 415),
            ("application/xml; note=application/json", 415),
            ("application/json", 201),
            ("Application/JSON; charset=utf-8", 201),
            ("application/vnd.kvxfer+json", 201),
        ):
            headers = {} if kind is None else {"Content-Type": kind}
            answer = await client.post("/v1/tokens", content=b'{"name": "x"}', headers=headers)
            assert answer.status_code == status, (kind, answer.text)
            if status == 415:
                assert answer.json()["code"] == "unsupported-media-type"
                assert "Content-Type: application/json" in answer.json()["detail"]
            # If the body is missing, that is the error.
            assert (await client.post("/v1/tokens", headers=headers)).status_code == 422, kind


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


async def test_many_records_are_listed_by_cursor(served: Served) -> None:
    agent = attached("a" * 32, "a", peers=[{"session": 1, "incarnation": "b" * 32, "name": "b"}])
    for begin in range(0, 10_000, 1000):
        served.daemon.intake.records(
            agent, [record(transfer=begin + n, context=f"r{begin + n}") for n in range(1000)]
        )
    seen: list[str] = []
    cursor: str | None = ""
    async with served.unix() as client:
        while cursor is not None:
            page = (await client.get("/v1/transfers", params={"cursor": cursor, "limit": 250})).json()
            seen += [item["id"] for item in page["items"]]
            cursor = page["next"]
        assert len(seen) == len(set(seen)) == 10_000
        one = (await client.get("/v1/transfers", params={"context": "r7777"})).json()["items"]
        assert [item["id"] for item in one] == [f"{'a' * 16}-{'b' * 16}-7777"]
        nothing = (await client.get("/v1/transfers", params={"agent": "nobody"})).json()
        assert nothing["items"] == []
