"""Event streams: resumed, filtered, late, many, and cut off."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from kvxfer.control.app import event_routes
from kvxfer.control.state.event_log import CAPACITY, EventLog, Wanted
from tests.control.serving import BOUND_S, Served


@asynccontextmanager
async def watching(client: httpx.AsyncClient, **asked: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Opens a stream, and yields its events as fields of server-sent events."""
    async with client.stream("GET", "/v1/events", **asked) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield read(answer)


async def read(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if line and name:
            event[name] = json.loads(value) if name == "data" else value
        elif "data" in event:
            yield event
            event = {}
        elif not line:
            event = {}


async def take(events: AsyncIterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(BOUND_S):
        return [await anext(events) for _ in range(count)]


def note(served: Served, count: int, topic: str = "test.done", tenant: str | None = None) -> None:
    for number in range(count):
        served.daemon.events.append(topic, 1.0, {"number": number}, tenant)
    served.daemon.events.wake()


@asynccontextmanager
async def raw_stream(served: Served, token: str) -> AsyncIterator[socket.socket]:
    """Asks for the stream on a socket that is read only by hand."""
    host, port = served.url.removeprefix("http://").split(":")
    ask = f"GET /v1/events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, ask.encode())
        yield client


async def test_events_come_as_they_happen_and_are_resumed_by_index(served: Served) -> None:
    async with served.unix() as client:
        async with watching(client) as events:
            note(served, 3)
            first = await take(events, 3)
        assert [event["event"] for event in first] == ["test.done"] * 3
        assert [event["data"]["index"] for event in first] == [int(event["id"]) for event in first]
        note(served, 2)
        for asked in (
            {"headers": {"Last-Event-ID": first[1]["id"]}},
            {"params": {"after": first[1]["id"]}},
            {"params": {"after": first[1]["id"]}, "headers": {"Last-Event-ID": "1"}},
        ):
            async with watching(client, **asked) as events:
                found = await take(events, 3)
            assert [int(event["id"]) for event in found] == list(
                range(int(first[2]["id"]), int(first[2]["id"]) + 3)
            )


async def test_topics_and_tenants_filter(served: Served) -> None:
    before = served.daemon.events.last
    for topic, tenant in (
        *(("transfers.done", None), ("transfers.failed", "red"), ("transfersX", "red")),
        *(("drain.begun", None), ("drain", None), ("pages.parked", "blue"), ("pages.parked", "")),
    ):
        note(served, 1, topic, tenant)
    red = await served.make_token("read", tenants=["red"])
    for token, topics, expected in (
        (served.token, [], [1, 2, 3, 4, 5, 6, 7]),
        (served.token, ["transfers"], [1, 2]),
        (served.token, ["transfers.*"], [1, 2]),
        (served.token, ["transfers.failed", "drain"], [2, 4, 5]),
        (red, [], [2, 3, 4]),
        (red, ["pages", "drain"], [4]),
    ):
        params: dict[str, Any] = {"topic": topics, "after": before}
        async with served.tcp(token) as client:
            recent = (await client.get("/v1/events/recent", params=params)).json()["items"]
            async with watching(client, params=params) as events:
                streamed = await take(events, len(expected))
        indexes = [before + number for number in expected]
        assert [event["index"] for event in recent] == indexes, (topics, token == red)
        assert [int(event["id"]) for event in streamed] == indexes, (topics, token == red)


async def test_an_index_from_elsewhere_is_taken_for_the_newest(served: Served) -> None:
    note(served, 3)
    async with served.unix() as client, watching(client, params={"after": 10**12}) as events:
        note(served, 1)
        assert [int(event["id"]) for event in await take(events, 1)] == [served.daemon.events.last]


def test_each_event_is_read_or_missed_in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    log = EventLog(first=100, capacity=50)
    begin = after = draw.randrange(100)  # of an earlier run of the daemon, except 99
    seen = missed = 0
    for step in range(500):
        for _ in range(draw.randrange(40)):
            log.append("test.done", 1.0, {})
        while after < log.last and (step == 499 or draw.random() < 0.5):
            batch = log.read(after, Wanted(), draw.randrange(1, 60))
            seen, missed, after = seen + len(batch.events), missed + batch.missed, batch.after
    assert seen + missed == log.last - begin


async def test_a_laggard_is_told_how_many_it_missed(served: Served) -> None:
    last = served.daemon.events.last
    async with served.unix() as client, watching(client, params={"after": last}) as events:
        note(served, CAPACITY + 1000)
        (missed,) = await take(events, 1)
        assert missed["event"] == "missed"
        assert missed["data"]["missed"] == 1000
        found = await take(events, CAPACITY)
        assert int(found[0]["id"]) == last + 1001
        assert int(found[-1]["id"]) == last + 1000 + CAPACITY


async def test_who_does_not_read_costs_a_bounded_buffer_and_is_told_later(served: Served) -> None:
    """A stream stalls while others continue; events that it did not read are overwritten."""
    async with raw_stream(served, served.token) as laggard:
        await served.until_watched(1)
        async with served.unix() as client, watching(client) as events:
            for _ in range(6):
                note(served, CAPACITY // 2)
                await take(events, CAPACITY // 2)
        text = b""
        async with asyncio.timeout(BOUND_S):
            while b"event: missed" not in text:
                text = text[-100:] + await asyncio.get_running_loop().sock_recv(laggard, 1 << 20)


@pytest.mark.parametrize("how", ["closed", "reset", "half"])
async def test_a_client_that_vanishes_leaves_nothing(served: Served, how: str) -> None:
    async with raw_stream(served, served.token) as client:
        await served.until_watched(1)
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif how == "half":
            note(served, 10)
            await asyncio.get_running_loop().sock_recv(client, 10)
    await served.until_watched(0)
    assert not served.daemon.events._wakers


async def test_streams_end_with_their_token(served: Served) -> None:
    token = await served.make_token("read")
    async with served.tcp(token) as client, watching(client) as events:
        note(served, 1)
        await take(events, 1)
        async with served.unix() as admin:
            await admin.delete(f"/v1/tokens/{token.split('_')[1]}")
        with pytest.raises(StopAsyncIteration):
            await take(events, 1)
    await served.until_watched(0)


async def test_streams_of_each_caller_are_bounded(served: Served) -> None:
    token = await served.make_token("read")
    async with AsyncExitStack() as stack:
        for _ in range(event_routes.MOST_STREAMS_EACH):
            await stack.enter_async_context(raw_stream(served, token))
        await served.until_watched(event_routes.MOST_STREAMS_EACH)
        async with served.tcp(token) as one, served.unix() as other:
            answer = await one.get("/v1/events")
            assert (answer.status_code, answer.json()["code"]) == (429, "exhausted")
            assert (await one.get("/v1/whoami")).status_code == 200
            async with watching(other) as events:
                note(served, 1)
                await take(events, 1)
    await served.until_watched(0)


async def test_a_hundred_watchers_of_ten_thousand_events(served: Served) -> None:
    """Each of ten groups watches its own topic, and sees all of it once."""

    async def watch(group: int) -> list[int]:
        async with served.unix() as client, watching(client, params={"topic": f"group{group}"}) as events:
            return [int(event["id"]) for event in await take(events, 1000)]

    watchers = [asyncio.create_task(watch(number % 10)) for number in range(100)]
    await served.until_watched(100)
    begin = served.daemon.events.last + 1
    for _ in range(100):
        for group in range(10):
            note(served, 10, f"group{group}.done")
        await asyncio.sleep(0.01)
    for number, found in enumerate(await asyncio.gather(*watchers)):
        group = number % 10
        assert found == [begin + index for index in range(10_000) if index // 10 % 10 == group]
