"""Servers that die, stop or are impostors: the others continue to serve, and nothing stays held."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvxfer.bench.engines.sglang_server import generate_request, meeting
from tests.sglang.engine import Engines, Server, handed_over, random_prompt, server, start_pair

# Only sockets: the memory of a stopped process could still be read, but its sockets are silent.
SETTINGS: dict[str, Any] = {"transports": ["tcp"], "silent_timeout_s": 3.0, "load_timeout_s": 10.0}
NUM_REQUESTS = 200
# The time after which a request that reached only one of two engines is given up.
ENVIRONMENT = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20"}
# Far above what any of it takes on two busy cores; a request that is never answered runs into it.
ANSWERED_S = 100.0

Two = tuple[Server, Server]


@pytest.fixture(scope="module")
def pair(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """A prefill and a decode that use only sockets."""
    folder = tmp_path_factory.mktemp("pair")
    with start_pair(weights, folder, environment=ENVIRONMENT, **SETTINGS) as pair:
        yield pair


@pytest.fixture
def start(weights: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts further engines like those of the pair."""
    started: list[Server] = []

    def start(role: str, environment: Mapping[str, str] = ENVIRONMENT) -> Server:
        started.append(
            server(f"another-{role}", weights, tmp_path, role, environment=environment, **SETTINGS)
        )
        return started[-1]

    yield start
    for each in started:
        each.stop()


def assert_serves(engines: Engines, prefill: Server, decode: Server, name: str) -> None:
    """Asserts that a pair answers a new prompt as one server does."""
    prompt = random_prompt(100, name)
    tokens, arrived = handed_over(prefill, decode, prompt)
    assert tokens == engines.expected(prompt)
    assert arrived > 0


def asked(prefill: Server, decode: Server, prompt: str, max_tokens: int = 32, **fields: Any) -> list[Any]:
    """Asks both at once, as a router does; returns each answer or error."""
    body = generate_request(prompt, max_tokens, **meeting(prefill), **fields)

    def ask(one: Server) -> Any:
        try:
            answer = httpx.post(f"{one.url}/generate", json=body, timeout=ANSWERED_S)
        except httpx.TransportError as error:
            return error
        return answer

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(ask, (prefill, decode)))


def failed(answer: Any) -> bool:
    return isinstance(answer, httpx.TransportError) or not answer.is_success


def test_wrong_secret_is_refused_by_its_request_alone(
    engines: Engines, pair: Two, start: Callable[..., Server]
) -> None:
    prefill, decode = pair
    secret = {"KVXFER_SECRET": "0123456789abcdef0123456789abcdef"}
    stranger = start("decode", environment=secret).wait_ready()
    of_prefill, of_stranger = asked(prefill, stranger, random_prompt(100, "stranger"))
    assert not isinstance(of_stranger, httpx.TransportError)
    assert of_stranger.status_code == 500
    assert "auth-failed" in of_stranger.text
    assert failed(of_prefill)
    assert not stranger.arrived()
    assert_serves(engines, prefill, decode, "beside a stranger")


def test_stopped_prefill_fails_its_request_and_serves_when_it_goes_on(engines: Engines, pair: Two) -> None:
    prefill, decode = pair
    assert_serves(engines, prefill, decode, "before the stop")
    body = generate_request(random_prompt(600, "stopped"), **meeting(prefill))
    prefill.signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as threads:
            try:
                answer = threads.submit(
                    httpx.post, f"{decode.url}/generate", json=body, timeout=ANSWERED_S
                ).result()
                assert answer.status_code == 500
            finally:
                prefill.signal(signal.SIGCONT)
    finally:
        prefill.signal(signal.SIGCONT)
    assert not decode.has_ended()
    assert_serves(engines, prefill, decode, "after the stop")
    prefill.held()
    decode.held()


def test_aborts_leave_nothing(engines: Engines, pair: Two, seed: int) -> None:
    prefill, decode = pair
    assert_serves(engines, prefill, decode, "before the aborts")
    before = prefill.held(), decode.held()
    draw = random.Random(seed)
    plans = [
        (
            random_prompt(draw.randrange(20, 900), ("aborted", at)),
            draw.choice([None, "prefill", "decode", "both", "leave"]),
            draw.choice([0.0, 0.02, 0.1, 0.3, 1.0]),
        )
        for at in range(NUM_REQUESTS)
    ]
    gone = []

    def one(at: int) -> None:
        prompt, who, after_s = plans[at]
        rid = f"aborted-{at}"
        body = generate_request(prompt, 8, **meeting(prefill), rid=rid)
        timeout = after_s + 0.01 if who == "leave" else ANSWERED_S

        def ask(engine: Server) -> None:
            try:
                if failed(httpx.post(f"{engine.url}/generate", json=body, timeout=timeout)):
                    gone.append(at)
            except httpx.TimeoutException:
                gone.append(at)

        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(ask, engine) for engine in pair]
            if who not in (None, "leave"):
                time.sleep(after_s)
                for engine in {"prefill": (prefill,), "decode": (decode,), "both": pair}[who]:
                    httpx.post(f"{engine.url}/abort_request", json={"rid": rid}, timeout=ANSWERED_S)
            for answer in answers:
                answer.result()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(NUM_REQUESTS)))
    assert gone, "every client had its answer in time"
    assert not prefill.has_ended()
    assert not decode.has_ended()
    assert_serves(engines, prefill, decode, "after the aborts")
    for engine, held in zip(pair, before, strict=True):
        engine.wait_held(held)
        engine.flush_cache()


def test_killed_ends_fail_their_requests_and_are_replaced(
    engines: Engines, pair: Two, start: Callable[..., Server]
) -> None:
    prefill, decode = pair
    another_prefill, another_decode = start("prefill"), start("decode")
    another_prefill.wait_ready()
    another_decode.wait_ready()
    assert_serves(engines, prefill, decode, "before anybody dies")
    with ThreadPoolExecutor(4) as threads:
        prompts = [random_prompt(900, ("killed prefill", at)) for at in range(4)]
        answers = [threads.submit(asked, prefill, decode, prompt, 200) for prompt in prompts]
        # The moment of the fault.
        time.sleep(0.2)
        prefill.signal(signal.SIGKILL)
        for answer in answers:
            of_prefill, of_decode = answer.result()
            # Prefill may have answered before; decode continues what had arrived and fails the others.
            assert not isinstance(of_decode, httpx.TransportError)
    assert not decode.has_ended()
    assert_serves(engines, another_prefill, decode, "with another prefill")
    decode.held(ANSWERED_S)
    with ThreadPoolExecutor(4) as threads:
        prompts = [random_prompt(900, ("killed decode", at)) for at in range(4)]
        answers = [threads.submit(asked, another_prefill, decode, prompt, 200) for prompt in prompts]
        # The moment of the fault.
        time.sleep(0.2)
        decode.signal(signal.SIGKILL)
        for answer in answers:
            of_prefill, of_decode = answer.result()
            assert not isinstance(of_prefill, httpx.TransportError)
            assert failed(of_decode)
    assert not another_prefill.has_ended()
    assert_serves(engines, another_prefill, another_decode, "with another decode")
    another_prefill.held(ANSWERED_S)
