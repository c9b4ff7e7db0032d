"""One served request from its sending to its last token, stage by stage. Pure.

Combines what clients saw with what observers saw of both engines' connectors. All of them stamp with
CLOCK_MONOTONIC, which the processes of a host share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvxfer.bench.run.stats import percentiles
from kvxfer.bench.serving.events import Seen

if TYPE_CHECKING:
    from kvxfer.bench.serving.load import Answer

#: stage -> its first and its last event. Together the stages are the time to first token. All but
#: ``load`` are time of the engines, the router and HTTP.
STAGES: Final = {
    "prefill": "from the client's request until prefill's scheduler ends the request",
    "to_decode": "prefill's answer, the router, decode's server and queue, until the prompt has blocks",
    "order": (
        "from the blocks of decode's scheduler until its worker gets the order, after the step's forward"
    ),
    "load": "from the order until the worker reports that the prompt is there (the connector's own)",
    "resume": "decode's scheduler runs the request, one forward, and the token's way to the client",
}
#: The connector's own time in a request's way, besides ``load``.
OWN: Final = {
    "decide": "calls of the connector at both schedulers for this request",
    "load": STAGES["load"],
    "own": "decide + load: what this connector, and not another, adds to the time to first token",
    "hold": ("the part of load in calls that start it and see its end, for which the engine's loop waits"),
}
_END_OF: Final = {"prefill": "finished", "to_decode": "allocated", "order": "ordered", "load": "loaded"}


def _own_of_vllm(stages_ms: Mapping[str, float], took_ns: Mapping[str, int]) -> dict[str, float]:
    decide = sum(took_ns.get(event, 0) for event in ("finished", "asked", "allocated")) / 1e6
    load = stages_ms["load"]
    hold = sum(took_ns.get(event, 0) for event in ("ordered", "loaded")) / 1e6
    return {"decide": decide, "load": load, "own": decide + load, "hold": hold}


@dataclass(frozen=True, slots=True)
class Course:
    """The way of a request through engines of one kind.

    ``stages``: when each begins and ends. ``ends``: the event that ends it; the last stage ends with the
    first token. ``own``: the connector's own part; ``own_ms`` computes it from the stages and from the time
    of the connector's calls.
    """

    stages: Mapping[str, str]
    ends: Mapping[str, str]
    own: Mapping[str, str]
    own_ms: Callable[[Mapping[str, float], Mapping[str, int]], dict[str, float]]


VLLM: Final = Course(STAGES, _END_OF, OWN, _own_of_vllm)
_MOVE: Final = (
    "from prefill's last computed chunk until decode's scheduler finds the prompt (the backend's own)"
)
SGLANG: Final = Course(
    {
        "prefill": (
            "from the client's request through the router until prefill has computed the prompt; decode waits"
        ),
        "move": _MOVE,
        "resume": "decode's scheduler runs the request, one forward, and the token's way to the client",
    },
    {"prefill": "computed", "move": "found"},
    {"move": _MOVE},
    lambda stages_ms, _: {"move": stages_ms["move"]},
)


@dataclass(frozen=True, slots=True)
class Served:
    """One request: its answer, and what the connectors did for it (None where there is one engine)."""

    answer: Answer
    seen: Seen | None
    course: Course = VLLM

    @property
    def was_handed_over(self) -> bool:
        """Whether decode got the prompt's cache from prefill."""
        seen = self.seen
        return (
            seen is not None
            and not seen.failed
            and all(end in seen.at_ns for end in self.course.ends.values())
        )

    def ends_ns(self) -> dict[str, int]:
        """Returns when each stage ended, in order. A stage that was over before it could begin took no time.

        When prefill pushes, decode may answer before prefill's scheduler hears of the transfer's end.
        """
        assert self.seen is not None
        at, first_token_ns = self.answer.sent_ns, self.answer.token_ns[0]
        found = {}
        for stage, event in self.course.ends.items():
            at = min(max(at, self.seen.at_ns[event]), first_token_ns)
            found[stage] = at
        return {**found, "resume": first_token_ns}

    def stages_ms(self) -> dict[str, float]:
        """Returns each stage's duration; their sum is the time to first token."""
        before, found = self.answer.sent_ns, {}
        for stage, at in self.ends_ns().items():
            found[stage] = (at - before) / 1e6
            before = at
        return found

    def own_ms(self) -> dict[str, float]:
        """Returns the duration of the connector's own parts."""
        assert self.seen is not None
        return self.course.own_ms(self.stages_ms(), self.seen.took_ns)


def summarize(served: Sequence[Served]) -> dict[str, Any]:
    """Returns figures of the requests that one system answered; empty if it answered none."""
    answered = [one for one in served if not one.answer.error]
    if not answered:
        return {}
    figures: dict[str, Any] = {"first_token_ms": percentiles(one.answer.first_token_ms for one in answered)}
    if gaps := [gap for one in answered for gap in one.answer.between_tokens_ms()]:
        figures["between_tokens_ms"] = percentiles(gaps)
    handed = [one for one in answered if one.was_handed_over]
    if handed:
        stages = [one.stages_ms() for one in handed]
        own = [one.own_ms() for one in handed]
        course = handed[0].course
        figures["stages_ms"] = {stage: percentiles(one[stage] for one in stages) for stage in course.stages}
        figures["own_ms"] = {part: percentiles(one[part] for one in own) for part in course.own}
    return figures
