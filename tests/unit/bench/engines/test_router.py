"""The router between real servers on loopback sockets, which look like engines to it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp

from kvxfer.bench.engines.options import RouterOptions
from kvxfer.bench.engines.router import create_app

BOUND_S = 30
HANDED_OVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_block_ids": [[3, 1, 4], [1, 5]],
    "remote_host": "127.0.0.1",
    "tp_size": 2,
    "a_later_field": {"of": ["another", None, 1.5]},
}


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serves an application on its own port, from its own thread; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(BOUND_S)
            assert not thread.is_alive()


class Engine:
    """Gives the test's answers, and records its requests."""

    def __init__(self, stack: ExitStack, answer: Any = None) -> None:
        self.begin(answer)
        app = FastAPI()

        @app.post("/v1/completions")
        @app.post("/v1/chat/completions")
        async def serve(request: Request) -> Response:
            self.asked.append((request.url.path, await request.json(), dict(request.headers)))
            answer, client_left = self.answer, self.client_left
            if answer is NEVER:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                client_left.set()
                return Response(status_code=499)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        self.url = stack.enter_context(serving(app))

    def begin(self, answer: Any) -> None:
        """Forgets its requests. From now on the answer is `answer`: JSON, a response or ``NEVER``."""
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.client_left = threading.Event()

    def body(self) -> dict[str, Any]:
        """What it was asked, which must have been once."""
        ((_, body, _),) = self.asked
        return body


NEVER = object()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine, str]]:
    """A prefill and a decode that all tests share, and the address of the router between them."""
    with ExitStack() as stack:
        prefill, decode = Engine(stack), Engine(stack)
        app = create_app(RouterOptions((prefill.url,), (decode.url,)))
        yield prefill, decode, stack.enter_context(serving(app))


@pytest.fixture
def prefill(engines: tuple[Engine, Engine, str]) -> Engine:
    engines[0].begin({"choices": [], "kv_transfer_params": HANDED_OVER})
    return engines[0]


@pytest.fixture
def decode(engines: tuple[Engine, Engine, str]) -> Engine:
    engines[1].begin({"choices": [{"text": "from decode"}]})
    return engines[1]


@pytest.fixture
def client(
    stack: ExitStack, prefill: Engine, decode: Engine, engines: tuple[Engine, Engine, str]
) -> httpx.Client:
    return stack.enter_context(httpx.Client(base_url=engines[2], timeout=BOUND_S))


def between(stack: ExitStack, prefills: list[str], decodes: list[str], **options: Any) -> httpx.Client:
    """A client of a router between engines."""
    app = create_app(RouterOptions(tuple(prefills), tuple(decodes), **options))
    url = stack.enter_context(serving(app))
    return stack.enter_context(httpx.Client(base_url=url, timeout=BOUND_S))


def leave(client: httpx.Client, body: dict[str, Any], *engines: Engine) -> None:
    """Sends a request, and leaves without an answer as soon as these engines got it."""
    connection = HTTPConnection(client.base_url.host, client.base_url.port, timeout=BOUND_S)
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        deadline = time.monotonic() + BOUND_S
        while not all(engine.asked for engine in engines):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "prompt", "bound"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}, {}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, {"max_completion_tokens": 1}),
    ],
)
def test_prefill_computes_one_token_and_decode_gets_the_request_and_the_parameters_as_they_are(
    client: httpx.Client, prefill: Engine, decode: Engine, path: str, prompt: dict[str, Any], bound: Any
) -> None:
    sampling = {**prompt, "temperature": 0.5, "stop": ["x"], "unknown": {"a": 1}}
    changed = {"n": 2, "stream": True, "max_tokens": 40, **dict.fromkeys(bound, 30)}
    dropped = {"min_tokens": 9, "stream_options": {"include_usage": True}}
    answer = client.post(path, json={**sampling, **changed, **dropped})
    assert answer.json() == {"choices": [{"text": "from decode"}]}
    assert prefill.asked[0][0] == decode.asked[0][0] == path
    keeps = {"do_remote_decode": True, "do_remote_prefill": False}
    one = {"n": 1, "stream": False, "max_tokens": 1, **bound}
    assert prefill.body() == {**sampling, **one, "kv_transfer_params": keeps}
    assert decode.body() == {**sampling, **changed, **dropped, "kv_transfer_params": HANDED_OVER}


def test_one_request_has_one_id_everywhere(client: httpx.Client, prefill: Engine, decode: Engine) -> None:
    headers = {"X-Request-Id": "r-1", "Authorization": "Bearer key"}
    answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    client.post("/v1/completions", json={"prompt": "a"})
    assert answer.headers["X-Request-Id"] == "r-1"
    for engine in (prefill, decode):
        assert engine.asked[0][2]["x-request-id"] == "r-1"
        assert engine.asked[0][2]["authorization"] == "Bearer key"
    chosen = {engine.asked[1][2]["x-request-id"] for engine in (prefill, decode)}
    assert len(chosen) == 1
    assert chosen.isdisjoint({"r-1", ""})


def test_engines_and_their_data_parallel_ranks_take_turns(stack: ExitStack) -> None:
    first, second = (Engine(stack, {"kv_transfer_params": HANDED_OVER}) for _ in range(2))
    decodes = [Engine(stack, {}) for _ in range(2)]
    ranks = [f"{first.url}#0", f"{first.url}/#1", second.url]
    client = between(stack, ranks, [engine.url for engine in decodes])
    for number in range(6):
        client.post("/v1/completions", json={"prompt": str(number)}).raise_for_status()

    def asked(engine: Engine) -> list[tuple[str, str | None]]:
        return [(body["prompt"], headers.get("x-data-parallel-rank")) for _, body, headers in engine.asked]

    assert asked(first) == [("0", "0"), ("1", "1"), ("3", "0"), ("4", "1")]
    assert asked(second) == [("2", None), ("5", None)]
    assert [asked(one) for one in decodes] == [[(n, None) for n in "024"], [(n, None) for n in "135"]]


def test_what_prefill_did_not_keep_decode_computes(
    client: httpx.Client, prefill: Engine, decode: Engine
) -> None:
    prefill.answer = {"choices": [], "kv_transfer_params": None}
    assert client.post("/v1/completions", json={"prompt": "a"}).is_success
    assert decode.body()["kv_transfer_params"] is None


def test_streamed_pieces_pass_while_decode_still_works(client: httpx.Client, decode: Engine) -> None:
    first_is_here = threading.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        # A router that collects the pieces would never send the first one to the client.
        assert await asyncio.to_thread(first_is_here.wait, BOUND_S)
        yield b"data: [DONE]\n\n"

    decode.answer = StreamingResponse(pieces(), media_type="text/event-stream")
    with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        arriving = answer.iter_raw()
        assert next(arriving) == b"data: 1\n\n"
        first_is_here.set()
        assert b"".join(arriving) == b"data: [DONE]\n\n"
    assert decode.body()["stream"] is True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("role", "wrong", "status", "words"),
    [
        ("prefill", JSONResponse({"error": {"message": "the cache is full"}}, 500), 502, "the cache is full"),
        ("prefill", Response(status_code=503), 502, "answered 503"),
        ("prefill", Response(status_code=429), 429, "answered 429"),
        ("prefill", Response("<html>"), 502, "is not a JSON object"),
        ("prefill", Response("[]"), 502, "is not a JSON object"),
        ("decode", JSONResponse({"error": "out of blocks"}, 500), 502, "out of blocks"),
    ],
)
def test_an_error_names_the_engine_and_the_reason(
    client: httpx.Client,
    prefill: Engine,
    decode: Engine,
    role: str,
    wrong: Response,
    status: int,
    words: str,
    stream: bool,
) -> None:
    engine = {"prefill": prefill, "decode": decode}[role]
    engine.answer = wrong
    answer = client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["backend"]) == (status, status, engine.url)
    assert error["type"] == f"{role}_error"
    assert words in error["message"]
    assert len(decode.asked) == (role == "decode")


def test_a_silent_engine_fails_the_request(stack: ExitStack, prefill: Engine, decode: Engine) -> None:
    prefill.answer = NEVER
    client = between(stack, [prefill.url], [decode.url], silence_timeout_s=2.0)
    answer = client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 504
    assert answer.json()["error"]["backend"] == prefill.url
    assert prefill.client_left.wait(BOUND_S)
    assert not decode.asked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_that_leaves_cancels_the_request(
    client: httpx.Client, prefill: Engine, decode: Engine, role: str, stream: bool
) -> None:
    engine = {"prefill": prefill, "decode": decode}[role]
    engine.answer = NEVER
    leave(client, {"prompt": "a", "stream": stream}, engine)
    assert engine.client_left.wait(BOUND_S)
    assert len(decode.asked) == (role == "decode")


RANKS = [{"name": "p.0", "address": "tcp://127.0.0.1:7"}]
TOLD = {"choices": [], "kv_transfer_params": {"kvxfer": {"version": 1, "ranks": RANKS}}}


@pytest.fixture
def concurrent(stack: ExitStack, prefill: Engine, decode: Engine) -> httpx.Client:
    """A client of a router that sends to both at once, and knows the addresses of prefill's agents."""
    client = between(stack, [prefill.url], [decode.url], dispatch="concurrent")
    prefill.begin(TOLD)
    client.post("/v1/completions", json={"prompt": "first"}).raise_for_status()
    # It did not know yet.
    assert "push" not in prefill.body()["kv_transfer_params"].get("kvxfer", {})
    assert decode.body()["kv_transfer_params"] == TOLD["kv_transfer_params"]
    prefill.begin(TOLD)
    decode.begin({"choices": [{"text": "from decode"}]})
    return client


def test_both_are_told_one_key_and_decode_where_prefill_is(
    concurrent: httpx.Client, prefill: Engine, decode: Engine
) -> None:
    for _ in range(2):
        answer = concurrent.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})
        assert answer.json() == {"choices": [{"text": "from decode"}]}
    keys = []
    for (_, asked, _), (_, also_asked, _) in zip(prefill.asked, decode.asked, strict=True):
        own = asked["kv_transfer_params"].pop("kvxfer")
        assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
        assert (asked["max_tokens"], also_asked["max_tokens"]) == (1, 9)
        assert also_asked["kv_transfer_params"] == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kvxfer": {**own, "ranks": RANKS},
        }
        keys.append(own["push"])
    assert len(set(keys)) == 2
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_when_one_of_both_fails_the_other_is_let_off(
    concurrent: httpx.Client, prefill: Engine, decode: Engine, role: str
) -> None:
    failing, waiting = (prefill, decode) if role == "prefill" else (decode, prefill)
    failing.answer, waiting.answer = JSONResponse({"error": "no"}, 500), NEVER
    answer = concurrent.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 502
    assert answer.json()["error"]["backend"] == failing.url
    assert waiting.client_left.wait(BOUND_S)
    # Prefill may have restarted: the router asks it first, and it sends its addresses again.
    prefill.begin(TOLD)
    decode.begin({})
    concurrent.post("/v1/completions", json={"prompt": "b"}).raise_for_status()
    assert "kvxfer" not in prefill.body()["kv_transfer_params"]


def test_a_client_that_leaves_cancels_both(concurrent: httpx.Client, prefill: Engine, decode: Engine) -> None:
    prefill.answer = decode.answer = NEVER
    leave(concurrent, {"prompt": "a"}, prefill, decode)
    assert prefill.client_left.wait(BOUND_S)
    assert decode.client_left.wait(BOUND_S)
