"""Real engines for tests: one alone for the expected tokens, and a prefill and a decode with a router."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.bench.engines.server_process import ServerProcess
from kvxfer.bench.engines.sglang_server import KVXFER, SglangRouter, SglangServer, generate, generate_apart
from tests import fork_server
from tests.seeds import next_seed
from tests.sglang import forked as sglang_forked
from tests.sglang import observed
from tests.waiting import until

#: Tokens that a prefill computes at once: longer prompts are sent chunk by chunk.
CHUNK = 256
# If a dozen spinning processes share two cores, one may not run for 15 s; it must not be lost.
_PATIENCE = {"connect_timeout_s": 20.0, "silent_timeout_s": 60.0}


class _Fork(ServerProcess):
    def __init__(self, name: str, command: Sequence[str], log: Path, **options: Any) -> None:
        forked = [sys.executable, "-m", fork_server.__name__, str(fork_server.start(sglang_forked.__name__))]
        super().__init__(name, [*forked, *command[1:]], log, **options)


class Server(SglangServer, _Fork):
    """A forked `SglangServer` that writes what it saw (tests/sglang/observed.py)."""

    @property
    def observed(self) -> Path:
        """The folder of what it saw."""
        return self.log.with_suffix("") / "observed"

    def arrived(self) -> list[dict[str, Any]]:
        """Returns the records of requests whose pages have arrived, from all its workers."""
        path = self.observed / observed.ARRIVED
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def num_pages_arrived(self) -> int:
        """Returns how many pages have arrived completely, over all workers."""
        return sum(line["arrived"] for line in self.arrived())

    def held(self, timeout_s: float = 30.0) -> list[dict[str, int]]:
        """Returns what each worker holds of requests, once all its queues are empty."""
        until(lambda: not self.is_busy(), f"{self.name} without requests", timeout_s=timeout_s, pause_s=0.1)
        asked_s = time.monotonic()

        def told() -> list[dict[str, int]]:
            found = [json.loads(path.read_text()) for path in sorted(self.observed.glob("held-*.json"))]
            return [each["held"] for each in found] if all(each["at_s"] > asked_s for each in found) else []

        return until(told, f"{self.name} idle", timeout_s=timeout_s, pause_s=0.1)

    def wait_held(self, expected: list[dict[str, int]], timeout_s: float = 60.0) -> None:
        """Waits until it holds of requests only what it held before."""
        deadline_s = time.monotonic() + timeout_s
        while (held := self.held(timeout_s)) != expected:
            more = [
                f"{name}: {before[name]} -> {after[name]}"
                for before, after in zip(expected, held, strict=True)
                for name in before
                if before[name] != after[name]
            ]
            assert time.monotonic() < deadline_s, f"{self.name} still has {'; '.join(more)}"
            time.sleep(0.5)


class Router(SglangRouter, _Fork):
    """SGLang's router, with nothing to import."""


@dataclass(frozen=True)
class Trio:
    """Engines of one model: one alone, and two that share the work."""

    alone: Server
    prefill: Server
    decode: Server

    def expected(self, prompt: str, max_tokens: int = 32) -> list[int]:
        """Returns the tokens that one engine gives."""
        return generate(self.alone, prompt, max_tokens).token_ids


@dataclass(frozen=True)
class Engines(Trio):
    """The same, with a router before the two."""

    router: Router


def handed_over(prefill: SglangServer, decode: Server, prompt: str) -> tuple[list[int], int]:
    """Returns the tokens of a pair, and how many whole pages of the prompt came from prefill."""
    before = decode.num_pages_arrived()
    tokens = generate_apart(prefill, decode, prompt).token_ids
    return tokens, decode.num_pages_arrived() - before


def random_prompt(num_tokens: int, seed: object = 1) -> str:
    """Returns a text of `num_tokens` tokens with which no other test begins."""
    letters = random.Random(next_seed("prompt", num_tokens, seed))
    return "".join(letters.choices("abcdefghijklmnopqrstuvwxyz ", k=num_tokens))


def server(
    name: str,
    weights: Path,
    folder: Path,
    role: str = "",
    *,
    backend: str = KVXFER,
    functions: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Server:
    """Returns an engine that is starting; ``settings`` are kvxfer's, ``functions`` further plug-ins."""
    watched = {observed.NAME: observed.ENTRY_POINT} if role and backend == KVXFER else {}
    seen = folder / name / "observed"
    seen.mkdir(parents=True)
    return Server(
        name,
        weights,
        folder / f"{name}.log",
        role=role,
        backend=backend,
        functions={**watched, **(functions or {})},
        arguments=("--chunked-prefill-size", str(CHUNK), *arguments),
        environment={
            observed.FOLDER: str(seen),
            "KVXFER_SGLANG": json.dumps({**_PATIENCE, **settings}),
            **(environment or {}),
        },
    )


@contextmanager
def start_pair(weights: Path, folder: Path, **settings: Any) -> Iterator[tuple[Server, Server]]:
    """Starts a prefill and a decode engine; ``settings`` are kvxfer's, for both."""
    with (
        server("prefill", weights, folder, "prefill", **settings) as prefill,
        server("decode", weights, folder, "decode", **settings) as decode,
    ):
        yield prefill.wait_ready(), decode.wait_ready()
