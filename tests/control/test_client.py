"""The clients: their description of the operations equals the daemon's, and they work over real sockets."""

from __future__ import annotations

import asyncio
import gc
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvxfer.control import AsyncClient, Client, ControlError, Missed, Retry, schema
from kvxfer.control.client import client_calls
from kvxfer.control.client.client_calls import Call
from kvxfer.control.client.client_events import EventCursor
from kvxfer.control.client.client_exchange import exchange, unanswered
from kvxfer.control.client.daemon_address import DaemonAddress, token_of
from kvxfer.errors import UsageError
from tests.control.serving import Served, program

BOUND_S = 60.0
# httpcore leaves a refused unix socket to the garbage collector, which must run within the test.
refused_sockets = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


CALLS: dict[str, Callable[..., Call[Any]]] = {
    name: made
    for name, made in inspect.getmembers(client_calls, inspect.isfunction)
    if not name.startswith("_") and made.__module__ == client_calls.__name__
}
# Streams have no single answer: clients return an iterator.
STREAMS = {"watch_events": "events"}
SALT: dict[str, Any] = {"model": "m", "keys": ["k"]}
SAMPLES: dict[type, Any] = {
    str: "a/b",
    bytes: b"",
    float: 1.0,
    schema.SettingsChange: schema.SettingsChange(log_level="info"),
    schema.ConnectRequest: schema.ConnectRequest(remote_agent="b"),
    schema.TransferRequest: schema.TransferRequest(
        agent="a", region="r", remote_agent="b", remote_region="s", src_blocks=[0], dst_blocks=[0]
    ),
    schema.LeaseRequest: schema.LeaseRequest(agent="a", region="r"),
    schema.ParkRequest: schema.ParkRequest(**SALT, agent="a", region="r", blocks=[0]),
    schema.FetchRequest: schema.FetchRequest(**SALT, layout="0" * 64, agent="a", region="r", blocks=[0]),
    schema.PageLeaseRequest: schema.PageLeaseRequest(**SALT, layout="0" * 64),
    schema.PagesRequest: schema.PagesRequest(**SALT, layout="0" * 64),
    schema.TokenRequest: schema.TokenRequest(name="t"),
    schema.EntryPublication: schema.EntryPublication(name="a", incarnation="0" * 32),
    schema.EntriesKept: schema.EntriesKept(entries=[schema.EntryKept(name="a", incarnation="0" * 32)]),
}


def sample(call: Callable[..., Call[Any]]) -> Call[Any]:
    hints = typing.get_type_hints(call)
    parameters = inspect.signature(call).parameters.values()
    needed = (each for each in parameters if each.default is inspect.Parameter.empty)
    return call(**{each.name: SAMPLES[hints[each.name]] for each in needed})


async def operations(served: Served) -> dict[str, tuple[str, str, set[str]]]:
    """Method, path and parameters of each operation, by its id."""
    async with served.unix() as client:
        document = (await client.get("/v1/openapi.json")).json()
    return {
        told["operationId"]: (method.upper(), path, {each["name"] for each in told.get("parameters", ())})
        for path, methods in document["paths"].items()
        for method, told in methods.items()
    }


async def test_both_clients_have_a_method_for_every_operation(served: Served) -> None:
    there = await operations(served)
    for client in (Client, AsyncClient):
        for name in there:
            assert callable(getattr(client, STREAMS.get(name, name), None)), f"{client.__name__} lacks {name}"
    assert CALLS.keys() == there.keys() - STREAMS.keys()


async def test_calls_are_what_the_daemon_takes(served: Served) -> None:
    there = await operations(served)
    for name, call in CALLS.items():
        made = sample(call)
        method, path, parameters = there[name]
        assert made.method == method, name
        assert re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), made.path), f"{name}: {made.path}"
        assert "a%2Fb" in made.path or "{" not in path
        assert {param for param, _ in made.params} <= parameters, name


async def test_the_page_asks_for_what_there_is(served: Served) -> None:
    there = {path for _, path, _ in (await operations(served)).values()}
    folder = Path(client_calls.__file__).parents[1] / "web"
    texts = "".join(path.read_text() for path in folder.glob("*.js"))
    asked = {re.sub(r"\$\{[^}]*\}", "{}", path) for path in re.findall(r"[\"`](/v1/[^\"`?]*)", texts)}
    assert len(asked) > 10
    assert asked <= {re.sub(r"\{\w+\}", "{}", path) for path in there}


async def test_answers_are_typed_and_lists_go_on_over_their_pages(served: Served) -> None:
    async with AsyncClient(served.socket) as client:
        node = await client.get_node()
        assert isinstance(node, schema.Node)
        assert node.node == "node-a"
        made = [await client.create_token(schema.TokenRequest(name=f"t{n}")) for n in range(5)]
        listed = [token.id async for token in client.tokens(limit=2)]
        assert {token.id for token in made} < set(listed)
        assert len(listed) == len(set(listed)) == 6
        assert "kvxfer" in await client.get_metrics()
    async with AsyncClient(served.url, token=made[0].secret) as client:
        assert (await client.whoami()).role == "read"


async def test_readiness_is_an_answer_also_where_it_is_not_ready(served: Served) -> None:
    async with AsyncClient(served.socket) as client:
        assert (await client.readyz()).ready
        assert (await client.begin_drain(deadline_s=5)).draining
        told = await client.readyz()
        assert not told.ready
        assert told.reasons
        assert not (await client.end_drain()).draining


@pytest.mark.parametrize(
    ("token", "ask", "code", "status"),
    [
        (None, lambda client: client.get_node(), "unauthorized", 401),
        ("kvx_0_wrong", lambda client: client.get_node(), "unauthorized", 401),
        ("read", lambda client: client.begin_drain(), "forbidden", 403),
        ("admin", lambda client: client.get_agent("no/such"), "not-found", 404),
        ("admin", lambda client: client.get_transfer("x" * 200), "invalid-argument", 422),
    ],
)
async def test_problems_become_errors(
    served: Served, token: str | None, ask: Callable[[AsyncClient], Any], code: str, status: int
) -> None:
    if token in ("read", "admin"):
        token = await served.make_token(token)
    async with AsyncClient(served.url, token=token) as client:
        with pytest.raises(ControlError) as caught:
            await ask(client)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert caught.value.detail
    assert caught.value.title


# ---- sending again -----------------------------------------------------------------------------------

GET, POST, DELETE = (
    client_calls.get_node(),
    client_calls.cancel_transfer("t"),
    client_calls.revoke_lease("l"),
)
NODE = schema.Node(
    node="n", incarnation="i", version="v", agent=None, address="", started_at_s=0, draining=False
).model_dump_json()
CANCELLED = b'{"id":"t","found":true}'
ENDED = b'{"id":"l","state":"revoked"}'
BROKEN, NOBODY, LATE = httpx.ReadError("reset"), httpx.ConnectError("refused"), httpx.ReadTimeout("late")


def answer(status: int, body: bytes = b"", **headers: str) -> httpx.Response:
    return httpx.Response(status, content=body, headers=headers)


def problem(code: str, status: int, **headers: str) -> httpx.Response:
    told = b'{"code":"%s","title":"t","detail":"d"}' % code.encode()
    return answer(status, told, **headers)


BUSY = problem("rate-limited", 429, **{"Retry-After": "1"})


@pytest.mark.parametrize(
    ("call", "outcomes", "ends"),
    [
        (GET, [answer(200, NODE.encode())], "answer"),
        (GET, [BROKEN, answer(200, NODE.encode())], "answer"),
        (GET, [NOBODY, NOBODY, NOBODY, NOBODY], "unreachable"),
        (GET, [BUSY, answer(200, NODE.encode())], "answer"),
        (GET, [LATE], "deadline"),
        (GET, [answer(200, b"{}")], "protocol"),
        (GET, [answer(502, b"<html>")], "protocol"),
        (POST, [BROKEN, answer(200, CANCELLED)], "answer"),
        (POST, [NOBODY, BUSY, answer(200, CANCELLED)], "answer"),
        (POST, [problem("conflict", 409)], "conflict"),
        (POST, [problem("exhausted", 429)], "exhausted"),
        (POST, [problem("rate-limited", 429, **{"Retry-After": "60"})], "rate-limited"),
        (DELETE, [NOBODY, answer(200, ENDED)], "answer"),
        (DELETE, [BROKEN], "unreachable"),  # it may be carried out; a second one would answer not-found
    ],
)
def test_what_is_safe_is_sent_again_a_bounded_number_of_times(
    call: Call[Any], outcomes: list[Any], ends: str
) -> None:
    steps = exchange(call, Retry(), "here")
    sent: list[dict[str, str]] = []
    given: Any = None
    left = list(outcomes)
    try:
        while True:
            step = steps.send(given)
            if isinstance(step, float):
                assert 0 < step <= 5
                given = None
            else:
                sent.append(step)
                given = left.pop(0)
    except StopIteration as end:
        found = "answer" if end.value is not None else "nothing"
    except ControlError as error:
        found = error.code
    assert found == ends
    assert left == []
    assert len({headers.get("Idempotency-Key") for headers in sent}) == 1
    assert ("Idempotency-Key" in sent[0]) is (call.method == "POST")


# ---- events ------------------------------------------------------------------------------------------


def test_a_cursor_reads_what_comes_in_pieces_and_knows_where_to_go_on() -> None:
    text = (
        b": events from 8 of abcd\n\n"
        b'event: missed\ndata: {"missed": 3, "oldest": 8}\n\n'
        b'id: 8\nevent: a.b\ndata: {"index":8,"topic":"a.b","at_s":1.5,"data":{"x":1}}\n\n'
        b": nothing\nid: 20\n\n"
    )
    cursor = EventCursor(("a",), None)
    found = [event for n in range(len(text)) for event in cursor.feed(text[n : n + 1])]
    assert found == [Missed(3, 8), schema.Event(index=8, topic="a.b", at_s=1.5, data={"x": 1})]
    assert cursor.incarnation == "abcd"
    assert cursor.params == [("topic", "a"), ("after", "20")]


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"index": 1}'])
def test_an_event_that_is_none_ends_the_stream(data: bytes) -> None:
    with pytest.raises(ControlError, match="protocol"):
        list(EventCursor((), 0).feed(b"event: a\ndata: " + data + b"\n\n"))


def test_an_event_without_an_end_is_bounded() -> None:
    cursor = EventCursor((), 0)
    chunks = [b"x" * (1 << 20)] * 5
    with pytest.raises(ControlError, match="an event is too long"):
        list(chain.from_iterable(map(cursor.feed, chunks)))


async def test_events_come_as_they_happen(served: Served) -> None:
    async with AsyncClient(served.socket) as client:
        events = client.events(topic=["drain"], after=served.daemon.events.last)
        first = asyncio.ensure_future(anext(events))
        await client.begin_drain(deadline_s=5)
        event = await asyncio.wait_for(first, BOUND_S)
        assert isinstance(event, schema.Event)
        assert event.topic == "drain.begun"
        await events.aclose()
        # From an index on, earlier events are sent as well.
        again = client.events(topic=["drain"], after=event.index - 1)
        assert await asyncio.wait_for(anext(again), BOUND_S) == event
        await again.aclose()


async def test_a_watcher_that_is_refused_is_told(served: Served) -> None:
    async with AsyncClient(served.url, token="kvx_0_wrong") as client:
        with pytest.raises(ControlError, match="unauthorized"):
            await anext(client.events())


@refused_sockets
def test_a_watcher_outlives_its_daemon(tmp_path: Path) -> None:
    """After a kill and a restart, events continue above all earlier indexes; those in between are missed."""

    def drain(client: Client) -> None:
        client.begin_drain(deadline_s=5)
        client.end_drain()

    with (
        program(tmp_path) as first,
        Client(tmp_path / "run") as client,
        closing(client.events(topic=["drain"], after=0)) as events,
    ):
        drain(client)
        before = _event(events)
        assert before.topic == "drain.begun"
        assert [_event(events).topic for _ in range(2)] == ["drain.ready", "drain.ended"]
        first.end(9)
        with program(tmp_path):
            drain(client)
            found: list[schema.Event | Missed] = []
            while not found or isinstance(found[-1], Missed):
                found.append(next(events))
            after = found[-1]
            assert isinstance(after, schema.Event)
            assert after.index > before.index
            assert sum(each.num_indexes for each in found if isinstance(each, Missed)) > 0


def _event(events: Iterator[schema.Event | Missed]) -> schema.Event:
    for each in events:
        if isinstance(each, schema.Event):
            return each
    raise AssertionError("the stream ended")


@refused_sockets
def test_a_blocking_client_asks_over_both_sockets(tmp_path: Path) -> None:
    with program(tmp_path) as daemon:
        with Client(daemon.url, token=daemon.token) as client:
            assert client.get_node().node == "node-a"
            assert [token.name for token in client.tokens()] == ["admin"]
            assert client.healthz().status == "ok"
        with Client(f"unix:{tmp_path}/run/api.sock") as client:
            assert client.whoami().role == "admin"
            with pytest.raises(ControlError, match="not-found"):
                client.get_agent("nobody")
        daemon.end()
        with (
            Client(tmp_path / "run", retry=Retry(attempts=1)) as client,
            pytest.raises(ControlError, match=r"no daemon answers at .*kvxfer serve"),
        ):
            client.get_node()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)",
            "https://h:1 speaks http, not https: write http://h:1",
        ),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:10)",
            "the certificate of https://h:1 is not trusted: self-signed certificate: name the file of its "
            "authority (--ca-file, or verify= in Python)",
        ),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: Hostname mismatch, certificate is "
            "not valid for 'h'. (_ssl.c:1006)",
            "the certificate of https://h:1 is not trusted: Hostname mismatch, certificate is not valid for "
            "'h'.: address the daemon by a name in its certificate",
        ),
        ("Connection refused", "no daemon answers at https://h:1 (Connection refused): start one"),
    ],
)
def test_a_daemon_that_speaks_otherwise_is_not_said_to_be_away(words: str, expected: str) -> None:
    error = unanswered(httpx.ConnectError(words), "https://h:1")
    assert (error.code, error.detail[: len(expected)]) == ("unreachable", expected)


def test_http_where_a_daemon_has_a_certificate_is_told_of_https() -> None:
    error = unanswered(httpx.RemoteProtocolError("Server disconnected"), "http://h:1")
    assert error.detail.endswith("Server disconnected; if the daemon has a certificate, write https")


# ---- where and with which token ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "socket"),
    [
        ("http://127.0.0.1:7380/", "http://127.0.0.1:7380", ""),
        ("https://node:7380", "https://node:7380", ""),
        ("unix:/run/x.sock", "http://localhost", "/run/x.sock"),
        ("unix:///run/x.sock", "http://localhost", "/run/x.sock"),
        ("/run/x.sock", "http://localhost", "/run/x.sock"),
    ],
)
def test_places_of_daemons(text: str, url: str, socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DaemonAddress.parse(text) == DaemonAddress(url, socket)
    monkeypatch.setenv("KVXFER_DAEMON_URL", text)
    assert DaemonAddress.parse(None) == DaemonAddress(url, socket)


@pytest.mark.parametrize("text", ["127.0.0.1:7380", "node-a:7380", "[::1]:7380"])
def test_a_host_and_a_port_are_no_path(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=re.escape(f"write http://{text}, or https://{text}")):
        DaemonAddress.parse(text)
    assert DaemonAddress.parse(f"unix:{text}") == DaemonAddress("http://localhost", text)
    monkeypatch.chdir(tmp_path)
    Path(text).touch()
    assert DaemonAddress.parse(text) == DaemonAddress("http://localhost", text)


@pytest.mark.parametrize("text", ["ftp://x", "http://", "http://user:secret@host", "http://host/?token=1"])
def test_what_is_no_daemon_is_refused_in_words(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        DaemonAddress.parse(text)
    assert caught.value.code == "invalid-argument"
    monkeypatch.setenv("KVXFER_DAEMON_URL", text)
    with pytest.raises(UsageError, match=r"^KVXFER_DAEMON_URL: "):
        DaemonAddress.parse()


def test_tokens_come_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVXFER_TOKEN_FILE", raising=False)
    assert token_of() is None
    file = tmp_path / "token"
    file.write_text("kvx_1_x\n")
    assert token_of(file) == "kvx_1_x"
    monkeypatch.setenv("KVXFER_TOKEN_FILE", str(file))
    assert token_of() == "kvx_1_x"
    for wrong in (b"", b"a\nb", b"\xff"):
        file.write_bytes(wrong)
        with pytest.raises(UsageError, match=r"^KVXFER_TOKEN_FILE: "):
            token_of()
