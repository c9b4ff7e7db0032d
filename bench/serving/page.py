"""The page of one `kvxfer bench serving`: every request of every system on a timeline, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvxfer.bench.report import html, plots
from kvxfer.bench.report.html import Content
from kvxfer.bench.report.plots import Bar
from kvxfer.bench.run.channel import Message
from kvxfer.bench.serving.stages import OWN, STAGES, Served

# Rows of a timeline; further requests are in the distributions.
_MAX_ROWS = 60
#: stage -> colour: what is the connector's, what lies between the engines, and what engines compute.
_COLOURS = {"prefill": 0, "to_decode": 1, "order": 1, "load": 2, "resume": 3}
_LEGEND = ("prefill", "to decode, order", "load: the connector's own", "resume")


def page(result: Message, served: Mapping[str, Sequence[Served]]) -> str:
    """Returns the page; of a run that was cut short what was seen before."""
    parts: list[Content] = []
    for name, words in result["failures"].items():
        parts.append(html.paragraph(f"{name} was left out: {words}", kind="bad"))
    if result["interrupted"]:
        parts.append(html.paragraph("interrupted: this is what was measured until then", kind="bad"))
    parts += _stages(result["systems"])
    parts += _handovers(served)
    for name, those in served.items():
        parts += _system(name, those)
    return html.page(f"kvxfer bench serving: {result['requests']} requests of {result['trace']}", parts)


def _stages(systems: Message) -> Iterable[Content]:
    """Medians of all systems beside each other, and what the stages are."""
    yield html.element("h2", "time to first token, by stage")
    rows = []
    for name, system in systems.items():
        segments, at = [], 0.0
        for stage, values in system.get("stages_ms", {}).items():
            segments.append((at, at + values["p50"], _COLOURS[stage]))
            at += values["p50"]
        if not segments and "first_token_ms" in system:
            segments = [(0.0, system["first_token_ms"]["p50"], 0)]
        rows.append(Bar(name, segments))
    yield html.figure(plots.bars(rows, "ms", _LEGEND), "Medians of each stage, one after the other.")
    meanings = {**STAGES, **OWN}
    found = []
    for what, those in (("stages_ms", STAGES), ("own_ms", OWN)):
        for stage in those:
            cells = [_row(system.get(what, {}).get(stage)) for system in systems.values()]
            if what == "stages_ms" or stage not in STAGES:
                found.append((stage.replace("_", " "), *cells, meanings[stage]))
    numbers = frozenset(range(1, 1 + len(systems)))
    yield html.table(("ms: p50 p90 p99", *systems, ""), found, numbers)


def _handovers(served: Mapping[str, Sequence[Served]]) -> Iterable[Content]:
    """All requests of all systems from the end of their prefill on."""
    rows = []
    for name, those in served.items():
        for one in [one for one in those if one.was_handed_over][:_MAX_ROWS]:
            ends = one.ends_ns()
            start = ends["prefill"]
            marks = [(ends[stage] - start) / 1e6 for stage in ends]
            stages = list(ends)[1:]
            segments = [
                (marks[index], marks[index + 1], _COLOURS[stage]) for index, stage in enumerate(stages)
            ]
            rows.append(Bar(f"{name}: {len(one.answer.asked.prompt)} tokens", segments))
    if rows:
        yield html.element("h2", "handovers")
        yield html.figure(
            plots.bars(rows, "ms after the end of prefill", ("", *_LEGEND[1:])),
            "From the end of a request's prefill to its first token at the client.",
        )


def _system(name: str, served: Sequence[Served]) -> Iterable[Content]:
    answered = [one for one in served if one.answer.token_ns]
    if not answered:
        return
    yield html.element("h2", name)
    first = [one.answer.first_token_ms for one in answered]
    gaps = [gap for one in answered for gap in one.answer.between_tokens_ms()]
    for words, values in (("time to first token, ms", first), ("between tokens, ms", gaps)):
        if values:
            caption = f"{len(values)} values; median {np.median(values):.3g}, largest {max(values):.3g}"
            yield html.figure(plots.distribution(values, words), caption)
    start_ns = {
        number: min(one.answer.arrival_ns for one in answered if one.round == number)
        for number in {one.round for one in answered}
    }
    rows = [_clock(one, start_ns[one.round]) for one in answered[:_MAX_ROWS]]
    yield html.figure(
        plots.bars(rows, "s after the round's first arrival", _LEGEND),
        "Each request on the clock of its round; points are tokens.",
    )


def _clock(one: Served, start_ns: int) -> Bar:
    at = (one.answer.arrival_ns - start_ns) / 1e9
    segments = []
    if one.was_handed_over:
        for stage, end_ns in one.ends_ns().items():
            end = (end_ns - start_ns) / 1e9
            segments.append((at, end, _COLOURS[stage]))
            at = end
    else:
        segments.append((at, (one.answer.token_ns[0] - start_ns) / 1e9, 0))
    points = [((token_ns - start_ns) / 1e9, 3) for token_ns in one.answer.token_ns]
    return Bar(f"{one.round + 1}: {len(one.answer.asked.prompt)} tokens", segments, points)


def _row(values: Message | None) -> str:
    return "" if values is None else " ".join(f"{values[key]:.4g}" for key in ("p50", "p90", "p99"))
