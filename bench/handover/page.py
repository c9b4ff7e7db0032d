"""The page of one ``kvxfer bench handover``: every request on a timeline, and where its time goes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvxfer.bench.handover.stages import STAGES, Handover
from kvxfer.bench.report import html, plots
from kvxfer.bench.report.html import Content
from kvxfer.bench.report.plots import Bar
from kvxfer.bench.run.channel import Message

# Rows of the timeline; further requests are in the tables and distributions.
_MAX_ROWS = 200
_NOT_SHOWN = frozenset({"bench", "verified", "failure"})


def page(result: Message, handovers: list[Handover]) -> str:
    """Returns the page; of a failed run what was seen before."""
    title = f"kvxfer bench handover: {result['model']} over {result['transport']}, {result['mode']}"
    parts: list[Content] = []
    if not result["verified"]:
        parts.append(html.paragraph(f"check failed: {result['failure']}", kind="bad"))
    if handovers:
        parts += _timeline(handovers)
        parts += _distributions(handovers)
        parts += _hidden(handovers)
        parts += _costs(handovers)
    parts.append(html.element("h2", "figures"))
    rows = [(name, _words(value)) for name, value in result.items() if name not in _NOT_SHOWN]
    parts.append(html.table(("", ""), rows))
    return html.page(title, parts)


def _timeline(handovers: list[Handover]) -> Iterable[Content]:
    yield html.element("h2", "timeline")
    rows = []
    for one in handovers[:_MAX_ROWS]:
        at = one.stages_ms()
        begin = min((one.released_ns[0] - one.prefill_end_ns) / 1e6, at["post"], 0.0)
        rows.append(
            Bar(
                f"{one.request}: {one.num_tokens} tokens",
                [(begin, 0.0, 0)],
                [(at["notification"], 2), (at["decode_may_start"], 3)],
                [(at["first_layer"], at["last_layer"], 1)],
            )
        )
    legend = ("prefill", "first to last layer arrives", "notification", "decode may start")
    caption = (
        "Each request from its first event on; 0 is the end of its prefill. What lies to the left of 0 is "
        "hidden behind prefill."
    )
    yield html.figure(plots.bars(rows, "ms after the end of prefill", legend, (0.0,)), caption)
    if len(handovers) > _MAX_ROWS:
        yield html.paragraph(f"the first {_MAX_ROWS} of {len(handovers)} requests", kind="dim")
    start_ns = min(one.arrival_ns for one in handovers)
    rows = [
        Bar(
            f"{one.request}: {one.num_tokens} tokens",
            [
                _segment(start_ns, one.arrival_ns, one.asked_ns, 1),
                _segment(start_ns, one.asked_ns, one.prefill_end_ns, 0),
                _segment(start_ns, one.prefill_end_ns, max(one.decode_may_start_ns, one.prefill_end_ns), 3),
            ],
        )
        for one in handovers[:_MAX_ROWS]
    ]
    yield html.figure(
        plots.bars(
            rows,
            "s",
            ("asked for until the end of prefill", "waiting for room", "", "until decode may start"),
        ),
        "All requests on one clock, from the first arrival on.",
    )


def _segment(start_ns: int, begin_ns: int, end_ns: int, colour: int) -> tuple[float, float, int]:
    return ((begin_ns - start_ns) / 1e9, (end_ns - start_ns) / 1e9, colour)


def _distributions(handovers: list[Handover]) -> Iterable[Content]:
    yield html.element("h2", "distributions")
    stages = [one.stages_ms() for one in handovers]
    for name, values in (
        ("decode may start, ms after the end of prefill", [one["decode_may_start"] for one in stages]),
        ("first layer movable to last layer in place, ms", [one.transfer_ns() / 1e6 for one in handovers]),
        ("rate of the transfer, GB/s", [one.nbytes / one.transfer_ns() for one in handovers]),
    ):
        caption = f"{len(values)} requests; median {np.median(values):.3g}, largest {max(values):.3g}"
        yield html.figure(plots.distribution(values, name), caption)


def _hidden(handovers: list[Handover]) -> Iterable[Content]:
    yield html.element("h2", "hidden behind prefill")
    shares = [(one, one.hidden_share() * 100) for one in handovers[:_MAX_ROWS]]
    rows = [
        Bar(f"{one.request}: {one.num_tokens} tokens", [(0.0, share, 0), (share, 100.0, 1)])
        for one, share in shares
    ]
    plot = plots.bars(rows, "% of the bytes", ("in place when prefill ended", "after it"))
    yield html.figure(plot, "Share of each request's bytes that cost no time to first token.")


def _costs(handovers: list[Handover]) -> Iterable[Content]:
    """Where the time after prefill goes: from each stage to the next, counted from the end of prefill."""
    yield html.element("h2", "cost by stage")
    costs: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for one in handovers:
        before = 0.0
        for stage, at in one.stages_ms().items():
            # A stage that was reached before prefill ended costs nothing; the order is time's.
            costs[stage].append(max(0.0, at - before))
            before = max(before, at)
    medians = {stage: float(np.median(values)) for stage, values in costs.items()}
    rows = [Bar(stage.replace("_", " "), [(0.0, cost, 0)]) for stage, cost in medians.items()]
    yield html.figure(plots.bars(rows, "ms"), "Time that each stage adds after the end of prefill (medians).")
    table = [
        (stage.replace("_", " "), f"{cost:.3f}", f"{np.percentile(costs[stage], 99):.3f}", STAGES[stage])
        for stage, cost in medians.items()
    ]
    yield html.table(("stage", "median ms", "p99 ms", ""), table, frozenset({1, 2}))


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
