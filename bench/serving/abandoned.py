"""``kvxfer bench abandoned``: clients leave behind a router that never asks decode for their prompts."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from kvxfer.bench.compare.rounds import ratios
from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.router import TO_PREFILL
from kvxfer.bench.engines.server_process import EngineServer
from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK, completion_request
from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import noise, shown
from kvxfer.bench.report.document import Part, Table, Words, number
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say
from kvxfer.bench.run.options import described
from kvxfer.bench.run.stats import percentiles
from kvxfer.bench.serving import load, systems
from kvxfer.bench.serving.deployment import Deployment
from kvxfer.bench.serving.options import AbandonedOptions
from kvxfer.bench.serving.systems import OURS, System

MODEL: Final = "llama"
#: Figures to compare with ours, and whether more is better.
COMPARED: Final[Mapping[str, bool]] = dict.fromkeys(("mean_ms", "longest_ms", "next_ms"), False)
# Decode's answers to clients that stay.
_MAX_OUTPUT: Final = 2
# At the first request the engines do not know each other yet.
_NUM_BEFORE: Final = 6


def run(options: AbandonedOptions, progress: Say, known: tuple[System, ...] | None = None) -> Message:
    """Runs it and returns one JSON object. A system that cannot run is named in ``failures``."""
    chosen = systems.chosen(options.systems, *(() if known is None else (known,)))
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-abandoned-"))
    model = tiny_models.save(MODEL, folder / "model")
    figures: dict[str, Message] = {}
    failures: dict[str, str] = {}
    before = noise.Sample.take()
    for at, system in enumerate(chosen):
        progress(Progress(at, len(chosen), f"{system.name}: {options.leave} of {options.clients} leave"))
        try:
            if words := system.missing():
                raise BenchError(words)
            figures[system.name] = _measure(system, model, folder / system.name, options)
        except BenchError as error:
            failures[system.name] = str(error)
    return {
        "bench": "abandoned",
        **described(options),
        "systems": figures,
        "asked_for": list(options.systems),
        "model": MODEL,
        "ratios": ratios(OURS, COMPARED, [figures]),
        "logs": {"folder": str(folder)},
        "failures": failures,
        "verified": True,
        "noise": noise.between(before, noise.Sample.take()),
    }


def _measure(system: System, model: Path, folder: Path, options: AbandonedOptions) -> Message:
    """Returns how long one system's prefill took for each client's request."""
    num_blocks = 1 + options.prompts_kept * math.ceil(
        (options.prompt_tokens + _MAX_OUTPUT) / TOKENS_PER_BLOCK
    )
    with Deployment(system, model, folder, num_blocks, ()) as deployment:
        deployment.wait_ready()
        clients = _Clients(deployment, options)
        before = [clients.ask("before", at, stays=True) for at in range(_NUM_BEFORE)][1:]
        deployment.settle()
        leave = set(random.Random(f"{options.seed} leave").sample(range(options.clients), options.leave))
        took = [clients.ask("client", at, stays=at not in leave) for at in range(options.clients)]
        following = clients.ask("next", 0, stays=True)
        return {
            "words": system.words,
            "settings": system.settings(),
            "before_ms": percentiles(before),
            "wait_ms": percentiles(took),
            "mean_ms": round(sum(took) / len(took), 3),
            "longest_ms": round(max(took), 3),
            "next_ms": round(following, 3),
        }


class _Clients:
    """Does a router's work for clients step by step, so that a step can be left out."""

    def __init__(self, deployment: Deployment, options: AbandonedOptions) -> None:
        self._prefill, self._decode = deployment.engines["prefill"], deployment.engines["decode"]
        self._options = options

    def ask(self, what: str, at: int, *, stays: bool) -> float:
        """Returns the milliseconds until prefill has answered. Asks decode only if the client stays."""
        prompt = load.prompt_of(self._options.prompt_tokens, self._options.seed, what, at)
        name = f"kvxfer-{what}-{at}x"
        start_s = time.monotonic()
        answer = _post(self._prefill, prompt, 1, name, TO_PREFILL)
        took_ms = (time.monotonic() - start_s) * 1e3
        if stays:
            told = answer.json().get("kv_transfer_params")
            if not told:
                raise BenchError(f"{self._prefill.name} handed nothing over; {self._prefill.last_words()}")
            _post(self._decode, prompt, _MAX_OUTPUT, name, told)
        return took_ms


def _post(
    engine: EngineServer, prompt: str, max_tokens: int, name: str, params: Mapping[str, Any]
) -> httpx.Response:
    request = completion_request(prompt, max_tokens, name, kv_transfer_params=params)
    try:
        return engine.client.post("/v1/completions", **request).raise_for_status()
    except httpx.HTTPError as error:
        words = f"{type(error).__name__}: {error}"
        raise BenchError(f"{engine.name} did not answer: {words}; {engine.last_words()}") from error


def parts(result: Message) -> Iterator[Part]:
    """Yields how long prefill took with each connector."""
    yield Words(
        f"abandoned: {result['leave']} of {result['clients']} clients leave after prefill's answer, and "
        f"decode is not asked for them; {result['prompt_tokens']} prompt tokens each, "
        f"{result['prompts_kept']} prompts fill a cache; vLLM on the CPU, model {result['model']}",
        "bold",
    )
    found: Message = result["systems"]
    if found:
        rows = [
            (label, *(_cell(system[name]) for system in found.values()))
            for name, label in (
                ("before_ms", "before the clients: p50 p90 p99"),
                ("wait_ms", "each client: p50 p90 p99"),
                ("mean_ms", "on average"),
                ("longest_ms", "longest"),
                ("next_ms", "the next client"),
            )
        ]
        yield Table(("ms until prefill answers", *found), rows)
    yield from shown.ratios(result, OURS, COMPARED)
    for name, system in found.items():
        settings = ", ".join(f"{key}={value}" for key, value in system["settings"].items())
        yield Words(f"{name}: {system['words']}" + (f"; {settings}" if settings else ""))
    yield Words(f"engines' logs: {result['logs']['folder']}", "dim")
    for name, words in result["failures"].items():
        yield Words(f"{name} was left out: {words}", "bad")


def _cell(value: float | Mapping[str, float]) -> str:
    return " ".join(number(each, 3) for each in (value.values() if isinstance(value, Mapping) else (value,)))
