"""Clients of a measured server. They send requests as there is room, and stamp every token."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from kvxfer.bench.engines.sglang_server import generate_request
from kvxfer.bench.engines.tiny_models import ALPHABET
from kvxfer.bench.engines.vllm_server import completion_request

_CONNECT_TIMEOUT_S = 5.0
# Further characters of an answer tell nothing new.
_MAX_WORDS = 500


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``name`` goes with it to every engine."""

    name: str
    prompt: str
    max_tokens: int


@dataclass(slots=True)
class Answer:
    """The answer to a request; times in nanoseconds of CLOCK_MONOTONIC. ``error`` is empty on success."""

    asked: Asked
    sent_ns: int = 0
    token_ns: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def first_token_ms(self) -> float:
        """From the request to its first token."""
        return (self.token_ns[0] - self.sent_ns) / 1e6

    def between_tokens_ms(self) -> list[float]:
        """Returns the time from each token to the next."""
        return [(b - a) / 1e6 for a, b in zip(self.token_ns, self.token_ns[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How to ask servers of one kind.

    ``request`` makes the arguments of an httpx client's ``post``. ``new_tokens`` reads an event of the
    answer; it is passed the number of tokens that came before.
    """

    path: str
    request: Callable[[Asked], Mapping[str, Any]]
    new_tokens: Callable[[Mapping[str, Any], int], Sequence[int]]


def _completion(asked: Asked) -> Mapping[str, Any]:
    return completion_request(
        asked.prompt, asked.max_tokens, asked.name, stream=True, ignore_eos=True, min_tokens=asked.max_tokens
    )


def _tokens_of_choices(event: Mapping[str, Any], _: int) -> list[int]:
    return [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or []]


VLLM: Final = Dialect("/v1/completions", _completion, _tokens_of_choices)
#: Every event of its answers has all tokens so far.
SGLANG: Final = Dialect(
    "/generate",
    lambda asked: {"json": generate_request(asked.prompt, asked.max_tokens, rid=asked.name, stream=True)},
    lambda event, num_before: event.get("output_ids", [])[num_before:],
)


def prompt_of(num_tokens: int, *seed: object) -> str:
    """Returns a text of so many tokens; one of another seed begins with other letters."""
    return "".join(random.Random(repr(seed)).choices(ALPHABET[:52], k=num_tokens))


def run(
    url: str, requests: Sequence[Asked], concurrency: int, timeout_s: float, dialect: Dialect = VLLM
) -> list[Answer]:
    """Sends requests to an engine or a router; returns their answers, in the order of the requests.

    ``concurrency`` of them are under way at once. A server may be silent for ``timeout_s``.
    """
    return asyncio.run(_run(url, requests, concurrency, timeout_s, dialect))


async def _run(
    url: str, requests: Sequence[Asked], concurrency: int, timeout_s: float, dialect: Dialect
) -> list[Answer]:
    answers = [Answer(asked) for asked in requests]
    room = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)

    async def one(client: httpx.AsyncClient, answer: Answer) -> None:
        async with room:
            await _ask(client, answer, dialect)

    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:
        await asyncio.gather(*(one(client, answer) for answer in answers))
    return answers


async def _ask(client: httpx.AsyncClient, answer: Answer, dialect: Dialect) -> None:
    asked = answer.asked
    request = dialect.request(asked)
    answer.sent_ns = time.monotonic_ns()
    try:
        async with client.stream("POST", dialect.path, **request) as response:
            if not response.is_success:
                reason = (await response.aread()).decode(errors="replace")
                answer.error = f"answered {response.status_code}: {reason}"[:_MAX_WORDS]
                return
            async for line in response.aiter_lines():
                _take(answer, line, time.monotonic_ns(), dialect)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"[:_MAX_WORDS]
        return
    if len(answer.token_ids) < asked.max_tokens and not answer.error:
        answer.error = f"ended after {len(answer.token_ids)} of {asked.max_tokens} tokens"


def _take(answer: Answer, line: str, now_ns: int, dialect: Dialect) -> None:
    """Reads one line of a stream of events. Tokens that come together get the same time."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = str(event["error"])[:_MAX_WORDS]
        return
    tokens = dialect.new_tokens(event, len(answer.token_ids))
    answer.token_ids += tokens
    answer.token_ns += [now_ns] * len(tokens)
