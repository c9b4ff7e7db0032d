"""vLLM's own proxies and its router, unmodified, before prefill and decode, asked by the `openai` client.

The proxies come from the source distribution of the installed vLLM; ``make test-vllm`` fetches them.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvxfer.bench.engines.server_process import ServerProcess, reserved_port
from kvxfer.bench.engines.vllm_server import MODEL, completion_request
from kvxfer.connectors.vllm.request import _streams_tell
from tests.vllm import tiny_models
from tests.vllm.engine import Engines, random_prompt, server, start_pair

FOLDER = Path(sys.prefix) / "proxies"
MAX_TOKENS = 24
APIS = ("completions", "chat")
EXPIRED = "vllm:kvxfer_expired_requests_total"


@dataclass(frozen=True)
class Proxy:
    """One proxy: its file, how its command names engines, and where it reports that it is ready."""

    file: str
    arguments: str
    health: str
    takes_host: bool = True
    #: Whether it passes prefill's parameters to decode; otherwise decode computes each prompt.
    carries: bool = True

    def start(self, engines: Engines, folder: Path, spare_port: int) -> ServerProcess:
        """Starts it before a pair."""
        path = FOLDER / self.file
        assert path.exists(), f"there is no {path}: `make test-vllm` fetches vLLM's proxies"
        places = {"prefill": engines.prefill.port, "decode": engines.decode.port, "spare": spare_port}
        command = [sys.executable, str(path), *self.arguments.format(**places).split()]
        options: dict[str, Any] = {"health": self.health, "takes_host": self.takes_host}
        # The router's modules lie beside it.
        options["environment"] = {"PYTHONPATH": str(FOLDER)}
        return ServerProcess(self.file, command, folder / f"{path.name}.log", **options)


_PORTS = (
    "--prefiller-host 127.0.0.1 --prefiller-port {prefill} --decoder-host 127.0.0.1 --decoder-port {decode}"
)
_URLS = "--prefill http://127.0.0.1:{prefill} --decode http://127.0.0.1:{decode}"
PROXIES = {
    "toy": Proxy("toy_proxy_server.py", _PORTS, "/healthcheck"),
    "multiturn": Proxy("disagg_proxy_multiturn.py", _PORTS, "/health"),
    "demo": Proxy(
        "disagg_proxy_demo.py",
        f"--model {MODEL} --prefill 127.0.0.1:{{prefill}} --decode 127.0.0.1:{{decode}}",
        "/status",
        takes_host=False,
        carries=False,
    ),
    # vllm-project/router, from its own wheel.
    "router": Proxy(
        "bin/vllm-router", "--vllm-pd-disaggregation --prometheus-port {spare} " + _URLS, "/health"
    ),
}


@pytest.fixture(scope="module")
def pair(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose decode keeps blocks for later turns; the shared ones if streams have no parameters."""
    if not _streams_tell():
        yield engines
        return
    folder = tmp_path_factory.mktemp("proxies")
    weights = tiny_models.save("llama", folder / "model")
    roles = ("kv_both", "kv_both")
    with start_pair(weights, folder, roles, lease_ttl_s=10.0, return_decoded=True) as (prefill, decode):
        yield Engines(engines.alone, prefill, decode, engines.router, folder / "observed")


@pytest.fixture(scope="module")
def proxies(pair: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """All of them, before the same engines."""
    folder = tmp_path_factory.mktemp("proxy")
    with ExitStack() as stack:
        spare: int = stack.enter_context(reserved_port()).getsockname()[1]
        started = {
            name: stack.enter_context(proxy.start(pair, folder, spare)) for name, proxy in PROXIES.items()
        }
        yield {name: proxy.wait_ready() for name, proxy in started.items()}


@pytest.fixture(scope="module")
def push_proxy(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engines, ServerProcess]]:
    """Engines that find each other by a request's name, behind the proxy that asks both at once."""
    folder = tmp_path_factory.mktemp("push")
    weights = tiny_models.save("llama", folder / "model")
    with reserved_port() as place:
        port = place.getsockname()[1]
        arguments = (
            f"--model {MODEL} --prefill 127.0.0.1:{{prefill}} --decode 127.0.0.1:{{decode}} "
            f"--prefill-engine-id prefill-1 --prefill-kv-host 127.0.0.1 --prefill-side-channel-port {port}"
        )
        file = "disagg_proxy_pushconnector_demo.py"
        with (
            server(
                "prefill", weights, folder, "kv_producer", engine_id="prefill-1", mode="push", port=port
            ) as prefill,
            server("decode", weights, folder, "kv_consumer") as decode,
        ):
            pair = replace(engines, prefill=prefill.wait_ready(), decode=decode.wait_ready())
            proxy = Proxy(file, arguments, "/status", takes_host=False)
            with proxy.start(pair, folder, 0) as started:
                yield pair, started.wait_ready()


def ask(server: ServerProcess, api: str, stream: bool, prompt: Any, max_tokens: int = MAX_TOKENS) -> str:
    """Returns the greedy continuation of a prompt, or of a conversation's messages."""
    return "".join(pieces(server, api, stream, prompt, max_tokens))


def pieces(
    server: ServerProcess, api: str, stream: bool, prompt: Any, max_tokens: int, **extra: Any
) -> Iterator[str]:
    """Yields the answer piece by piece."""
    wanted: dict[str, Any] = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        if api == "chat":
            messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            said: Any = client.chat.completions.create(messages=messages, extra_body=extra, **wanted)
        else:
            said = client.completions.create(prompt=prompt, extra_body=extra, **wanted)
        for piece in said if stream else [said]:
            for choice in piece.choices:
                if api == "completions":
                    yield choice.text or ""
                else:
                    yield (choice.delta if stream else choice.message).content or ""


def brought(pair: Engines) -> tuple[int, int]:
    """Returns how many prompt tokens decode got from prefill, and how many it computed."""
    return pair.decode.prompt_tokens("external_kv_transfer"), pair.decode.prompt_tokens("local_compute")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", PROXIES)
def test_answers_are_those_of_one_engine_and_decode_computes_no_prompt(
    pair: Engines, proxies: dict[str, ServerProcess], name: str, api: str, stream: bool
) -> None:
    prompt = random_prompt(300, seed=len(name) + 100 * stream)
    from_prefill, computed = brought(pair)
    answer = ask(proxies[name], api, stream, prompt)
    after = brought(pair)
    from_prefill, computed = after[0] - from_prefill, after[1] - computed
    # A letter is a token, and a stop token is never the likeliest.
    assert len(answer) == MAX_TOKENS
    assert answer == ask(pair.alone, api, False, prompt)
    if PROXIES[name].carries:
        assert from_prefill >= len(prompt)
        assert computed == 0
    else:
        assert from_prefill == 0
        assert computed >= len(prompt)


def test_several_requests_at_once_are_not_mixed_up(pair: Engines, proxies: dict[str, ServerProcess]) -> None:
    asked = [
        (name, api, stream, random_prompt(100 + 40 * at, seed=at))
        for at, (name, api, stream) in enumerate(
            (name, api, stream) for name in PROXIES for api in APIS for stream in (False, True)
        )
    ]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda each: ask(proxies[each[0]], *each[1:]), asked))
    for (_, api, _, prompt), answer in zip(asked, answers, strict=True):
        assert answer == ask(pair.alone, api, False, prompt)


def test_clients_that_leave_keep_no_blocks(
    pair: Engines, proxies: dict[str, ServerProcess], seed: int
) -> None:
    chance = random.Random(seed)

    def leave(name: str, number: int) -> None:
        if number % 2:
            # When decode has begun to answer.
            answer = pieces(proxies[name], "completions", True, random_prompt(600, number), 400)
            next(answer)
            answer.close()  # type: ignore[attr-defined]
            return
        request = completion_request(random_prompt(900, number), 400)
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{proxies[name].url}/v1/completions", timeout=chance.uniform(0.01, 0.5), **request)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(leave, list(PROXIES) * 6, range(6 * len(PROXIES))))
    # Requests that decode never got are given back at their deadline.
    pair.wait_empty(40)
    prompt = random_prompt(500)
    for name in PROXIES:
        assert ask(proxies[name], "chat", True, prompt) == ask(pair.alone, "chat", False, prompt)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_turns_of_a_conversation_come_back_and_leave_nothing_kept(
    pair: Engines, proxies: dict[str, ServerProcess], stream: bool
) -> None:
    pair.wait_empty(40)
    returned = pair.prefill.prompt_tokens("external_kv_transfer")
    computed = brought(pair)[1]
    expired = [engine.metric(EXPIRED) for engine in (pair.prefill, pair.decode)]
    messages: list[dict[str, str]] = []
    for turn in range(4):
        messages.append({"role": "user", "content": random_prompt(120, seed=turn + 10 * stream)})
        conversation = {"conversation_id": f"conversation {stream}"}
        come = pieces(proxies["multiturn"], "chat", stream, messages, 64, **conversation)
        answer = "".join(come)
        assert answer == ask(pair.alone, "chat", False, messages, 64)
        messages.append({"role": "assistant", "content": answer})
    assert brought(pair)[1] == computed
    returned = pair.prefill.prompt_tokens("external_kv_transfer") - returned
    # The first turn has no predecessor; for each later turn, prefill lacks the tokens that decode added.
    assert (returned >= 3 * 32) if _streams_tell() else (returned == 0)
    pair.wait_empty(40)
    expired_now = [engine.metric(EXPIRED) for engine in (pair.prefill, pair.decode)]
    # Of all kept turns, only the last one was not fetched: no proxy can know that it is the last.
    assert expired_now == [expired[0], expired[1] + int(_streams_tell())]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
def test_engines_that_are_asked_at_once_by_one_name_push(
    push_proxy: tuple[Engines, ServerProcess], api: str, stream: bool
) -> None:
    pair, proxy = push_proxy
    before = brought(pair)
    prompts = [random_prompt(length, seed=10 * stream) for length in (20, 300, 900)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: ask(proxy, api, stream, prompt), prompts))
    after = brought(pair)
    assert answers == [ask(pair.alone, api, False, prompt) for prompt in prompts]
    # In a push, decode gets all tokens except the last, which it computes.
    assert after[0] - before[0] >= sum(map(len, prompts)) - len(prompts)
    assert after[1] - before[1] <= len(prompts)
    pair.wait_empty(40)


# The proxy for several turns joins all answers into one.
@pytest.mark.parametrize("name", ["toy", "router"])
def test_prompts_in_one_request_are_all_brought(
    pair: Engines, proxies: dict[str, ServerProcess], name: str
) -> None:
    prompts = [random_prompt(length, seed=len(name)) for length in (20, 300, 90)]
    before = brought(pair)
    answers = []
    for asked in (proxies[name], pair.alone):
        request = completion_request(prompts, MAX_TOKENS)
        choices = asked.client.post("/v1/completions", **request).raise_for_status().json()["choices"]
        answers.append([choice["text"] for choice in sorted(choices, key=lambda each: int(each["index"]))])
    assert answers[0] == answers[1]
    after = brought(pair)
    # The others are pushes, in which decode computes the last token.
    assert after[0] - before[0] >= sum(map(len, prompts)) - len(prompts)
    assert after[1] - before[1] <= len(prompts)
