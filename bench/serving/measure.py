"""``kvxfer bench serving``: prefill and decode on real engines, with several connectors in turns."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvxfer.bench.compare.rounds import ratios, rotated
from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK
from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import noise
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say
from kvxfer.bench.run.options import described
from kvxfer.bench.run.stats import spread
from kvxfer.bench.serving import load, systems
from kvxfer.bench.serving.deployment import Deployment
from kvxfer.bench.serving.events import Costs, us_per_step
from kvxfer.bench.serving.load import Answer, Asked
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.serving.stages import Served, summarize
from kvxfer.bench.serving.systems import OURS_OF, SGLANG, System
from kvxfer.bench.work.trace import TraceRequest

MODEL: Final = "llama-pages"
#: Figures to compare with ours, and whether more is better.
COMPARED: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("first_token_ms", "between_tokens_ms"), False),
    **dict.fromkeys(("own_ms", "load_ms", "decide_ms", "hold_ms"), False),
    **dict.fromkeys(("prefill_step_us", "decode_step_us"), False),
    "move_ms": False,
}
# Tokens of one engine step, enough to compute a prompt of the default length at once.
_BATCH_TOKENS: Final = 2048
# SGLang's decode accepts a request only if this many tokens are free for its output.
_RESERVED_TOKENS: Final = 512
# On a busy machine the engines' handshake may time out; the next request tries again.
_FIRST_ATTEMPTS: Final = 3
# An engine still finishes work after its answer. After that it is watched for this long.
_REST_S: Final = 1.0
_IDLE_S: Final = 3.0


@dataclass(slots=True)
class _Turn:
    """What one system did in one round."""

    served: list[Served]
    costs: dict[str, dict[str, Costs]]  # role -> half


@dataclass(slots=True)
class _Measured:
    """All that is known about one system."""

    system: System
    idle_cores: float = 0.0
    turns: dict[int, _Turn] = field(default_factory=dict)

    @property
    def served(self) -> list[Served]:
        return [one for turn in self.turns.values() for one in turn.served]


def _num_blocks(options: ServingOptions) -> int:
    """Returns each engine's number of blocks: what open requests can need, and one that engines keep."""
    tokens = options.max_tokens + options.max_output_tokens
    if options.engine == SGLANG:
        tokens += _RESERVED_TOKENS
    return 1 + options.concurrency * math.ceil(tokens / TOKENS_PER_BLOCK)


def _arguments(options: ServingOptions) -> tuple[str, ...]:
    """Returns each engine's arguments besides those that all tiny engines get."""
    num_tokens = options.max_tokens + options.max_output_tokens
    if options.engine == SGLANG:
        return (
            # The engine needs room for a few tokens that it adds itself.
            *("--context-length", str(min(num_tokens + TOKENS_PER_BLOCK, tiny_models.MAX_TOKENS))),
            *("--chunked-prefill-size", str(_BATCH_TOKENS)),
        )
    return (
        *("--max-model-len", str(num_tokens)),
        *("--max-num-batched-tokens", str(_BATCH_TOKENS)),
        "--disable-uvicorn-access-log",
    )


def num_warm_ups(options: ServingOptions) -> int:
    """Returns how many of the longest prompts touch every block. Engines take unused blocks first."""
    return math.ceil(_num_blocks(options) * TOKENS_PER_BLOCK / options.max_tokens) + 1


def run(
    options: ServingOptions,
    progress: Say,
    known: tuple[System, ...] | None = None,
) -> Message:
    """Runs it and returns one JSON object. If it ends early, that has what was measured until then.

    A system that cannot run, or whose engine dies, is left out from then on and named in ``failures``.
    """
    requests = options.read_requests()
    of = {} if known is None else {"known": known}
    chosen = systems.chosen(options.wanted, engine=options.engine, **of)
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-serving-"))
    comparison = _Comparison(options, requests, chosen, folder, progress)
    with ExitStack() as stack:
        comparison.run(stack)
    return {
        "bench": "serving",
        **described(options),
        "systems": comparison.figures(),
        "asked_for": list(options.wanted),
        "model": MODEL,
        "prompt_tokens": sum(request.input_tokens for request in requests),
        "ratios": ratios(OURS_OF[options.engine], COMPARED, comparison.rounds()),
        "served": comparison.requests(),
        "logs": {"folder": str(folder)},
        "failures": comparison.failures,
        "verified": True,
        "noise": comparison.noise,
    }


class _Comparison:
    """The rounds of one run. Keeps their figures when the run is cut short."""

    def __init__(
        self,
        options: ServingOptions,
        requests: list[TraceRequest],
        chosen: tuple[System, ...],
        folder: Path,
        progress: Say,
    ) -> None:
        self._options = options
        self._requests = requests
        self._systems = chosen
        self._folder = folder
        self._progress = progress
        self._total = len(chosen) * (1 + options.rounds)
        self._done = 0
        self.measured = {system.name: _Measured(system) for system in chosen}
        #: System -> why it was left out.
        self.failures: dict[str, str] = {}
        #: Kept besides the rounds: once an engine has ended, what its processes used cannot be read.
        self.noise: Message | None = None

    def run(self, stack: ExitStack) -> None:
        """Starts every system, one after the other, and runs all rounds."""
        model = tiny_models.save(MODEL, self._folder / "model")
        up: dict[str, Deployment] = {}
        for system in self._systems:
            self._say(f"{system.name}: starting and warming up")
            if words := system.missing():
                self._fail(system.name, words)
                continue
            try:
                up[system.name] = self._start(system, model, stack)
            except BenchError as error:
                self._fail(system.name, str(error))
            self._done += 1
        before = noise.Sample.take()
        try:
            for number in range(self._options.rounds):
                for name in rotated(list(up), number):
                    if name not in self.failures:
                        self._say(f"round {number + 1}: {name}")
                        self._take_turn(up[name], number)
                    self._done += 1
        finally:
            self.noise = noise.between(before, noise.Sample.take())
        self._say("ending the engines")

    def _start(self, system: System, model: Path, stack: ExitStack) -> Deployment:
        """Starts a system, warms it up, and pauses it."""
        options = self._options
        deployment = stack.enter_context(
            Deployment(system, model, self._folder / system.name, _num_blocks(options), _arguments(options))
        )
        try:
            self._warm_up(deployment)
        except BenchError:
            deployment.close()
            raise
        return deployment

    def _warm_up(self, deployment: Deployment) -> None:
        options, system = self._options, deployment.system
        deployment.wait_ready()
        # The first request introduces the engines to each other; the others touch every page of the caches.
        for attempt in range(_FIRST_ATTEMPTS):
            (first,) = self._serve(
                deployment, [self._asked(system, "first", attempt, options.max_tokens // 2)]
            )
            if not first.answer.error:
                break
        else:
            raise BenchError(
                f"{system.name}: the first request failed {_FIRST_ATTEMPTS} times: {first.answer.error}; "
                f"{deployment.engines[next(reversed(deployment.engines))].last_words()}"
            )
        warm_ups = self._serve(
            deployment,
            [
                self._asked(system, "warm", index, options.max_tokens)
                for index in range(num_warm_ups(options))
            ],
        )
        if errors := [one.answer.error for one in warm_ups if one.answer.error]:
            raise BenchError(f"{system.name}: {len(errors)} of {len(warm_ups)} warm-ups failed: {errors[0]}")
        deployment.settle()
        time.sleep(_REST_S)
        used_s, start_s = deployment.processor_s(), time.monotonic()
        time.sleep(_IDLE_S)
        idle_cores = (deployment.processor_s() - used_s) / (time.monotonic() - start_s)
        self.measured[system.name].idle_cores = round(idle_cores, 4)
        deployment.pause()

    def _take_turn(self, deployment: Deployment, number: int) -> None:
        name = deployment.system.name
        deployment.resume()
        try:
            self.measured[name].turns[number] = self._turn(deployment, number)
            deployment.pause()
        except BenchError as error:
            self._fail(name, str(error))
            deployment.close()

    def _turn(self, deployment: Deployment, number: int) -> _Turn:
        asked = [
            self._asked(
                deployment.system,
                f"r{number}",
                index,
                request.input_tokens,
                min(request.output_tokens, self._options.max_output_tokens),
            )
            for index, request in enumerate(self._requests)
        ]
        deployment.observations.read()
        before = deployment.observations.costs()
        served = self._serve(deployment, asked)
        if ending := deployment.ending():
            raise BenchError(ending)
        errors = [one.answer.error for one in served if one.answer.error]
        if len(errors) == len(served):
            raise BenchError(f"all {len(errors)} requests failed: {errors[0]}")
        deployment.settle()
        # Read again, because prefill's scheduler may hear of the end after decode's last token.
        served = self._joined(deployment, [one.answer for one in served])
        took = {
            role: {half: after - before.get(role, {}).get(half, Costs()) for half, after in halves.items()}
            for role, halves in deployment.observations.costs().items()
        }
        return _Turn(served, took)

    def _serve(self, deployment: Deployment, asked: list[Asked]) -> list[Served]:
        options = self._options
        dialect = load.SGLANG if options.engine == SGLANG else load.VLLM
        answers = load.run(deployment.url, asked, options.concurrency, options.timeout_s, dialect)
        return self._joined(deployment, answers)

    def _joined(self, deployment: Deployment, answers: list[Answer]) -> list[Served]:
        deployment.observations.read()
        seen = deployment.observations.requests(answer.asked.name for answer in answers)
        system = deployment.system
        return [
            Served(answer, seen[answer.asked.name] if system.is_pair else None, system.course)
            for answer in answers
        ]

    def _asked(self, system: System, what: str, index: int, num_tokens: int, max_tokens: int = 2) -> Asked:
        # The name ends in a letter, so that no name is the beginning of another.
        name = f"kvxfer-{system.name.replace('+', '-')}-{what}-{index}x"
        return Asked(name, load.prompt_of(num_tokens, self._options.seed, what, index), max_tokens)

    def _say(self, words: str) -> None:
        self._progress(Progress(self._done, self._total, words))

    def _fail(self, name: str, words: str) -> None:
        self.failures[name] = words
        self._say(f"{name} is left out: {words}")

    # ---- what it gave -----------------------------------------------------------------------

    def figures(self) -> dict[str, Message]:
        """Returns each measured system with its description and its figures over all rounds."""
        return {
            name: {
                "words": one.system.words,
                "settings": one.system.settings(),
                **summarize(one.served),
                **_step_costs(list(one.turns.values())),
                "idle_cores": one.idle_cores,
            }
            for name, one in self.measured.items()
            if one.turns
        }

    def rounds(self) -> list[dict[str, dict[str, float]]]:
        """Returns each system's figures in each round."""
        return [
            {name: _compared(one.turns[number]) for name, one in self.measured.items() if number in one.turns}
            for number in range(self._options.rounds)
        ]

    def requests(self) -> dict[str, Message]:
        """Returns for each system how many requests it had, how many failed, how many were handed over."""
        found = {}
        for name, one in self.measured.items():
            errors = [served.answer.error for served in one.served if served.answer.error]
            found[name] = {
                "requests": len(one.served),
                "failed": len(errors),
                "failure": errors[0] if errors else "",
                "handed_over": sum(served.was_handed_over for served in one.served),
            }
        return found


def _step_costs(turns: list[_Turn]) -> Message:
    """Returns ``step_us``: the time of both halves' connector calls in a step of each engine."""
    costs = {
        role: [
            sum(us_per_step(half) for half in turn.costs[role].values())
            for turn in turns
            if any(half["steps"] for half in turn.costs.get(role, {}).values())
        ]
        for role in ("prefill", "decode")
    }
    return {"step_us": {role: spread(values) for role, values in costs.items() if values}}


def _compared(turn: _Turn) -> dict[str, float]:
    """Returns the medians of a turn, by the names of `COMPARED`."""
    figures = summarize(turn.served)
    if not figures:
        return {}
    latencies = ("first_token_ms", "between_tokens_ms")
    row: dict[str, float] = {name: figures[name]["p50"] for name in latencies if name in figures}
    row |= {f"{part}_ms": values["p50"] for part, values in figures.get("own_ms", {}).items()}
    steps = _step_costs([turn])["step_us"]
    return row | {f"{role}_step_us": values["median"] for role, values in steps.items()}
