"""What a handover is shown as: its table, and the page with every request on a timeline."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.bench.handover.stages import STAGES, Handover
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Figure, Heading, Part, Table, Words
from kvxfer.bench.run.channel import Message

_PERCENTILES = ("p50", "p90", "p99")
# Rows of the timeline; further requests are in the table.
_MAX_ROWS = 200
_FIGURES = {
    "limit_last_layer_ms": ("(limit: last layer)", "the same layers, moved at the limit's rate"),
    "transfer_ms": ("transfer, ms", "first layer movable to last layer in place"),
    "gb_per_s": ("transfer, GB/s", "paced by prefill where layers are pushed"),
    "queue_ms": ("waited", "from its arrival until decode had room"),
    "arrival_to_decode_ms": ("arrival to decode", "waiting, prefill and the handover"),
}


def parts(result: Message) -> Iterator[Part]:
    """Yields what a result is shown as."""
    mib = result["total_nbytes"] / (1 << 20)
    yield Words(
        f"{result['mode']} over {result['transport']}: {result['requests']} requests of "
        f"{result['trace']}, {result['tokens']} tokens of {result['model']}, {mib:.0f} MiB in "
        f"{result['num_pages']} pages of {result['page_nbytes'] / 1024:g} KiB",
        "bold",
    )
    if result["prefills"] > 1 or result["decodes"] > 1:
        yield Words(f"{result['prefills']} prefill and {result['decodes']} decode processes, in turn")

    def row(label: str, values: Message, meaning: str) -> tuple[str | Words, ...]:
        return (label, *(f"{values[key]:.2f}" for key in _PERCENTILES), Words(meaning, "dim"))

    stages = result["stages_ms"].items()
    rows = [row(stage.replace("_", " "), values, STAGES[stage]) for stage, values in stages]
    rows.append(())
    rows += [row(label, result[name], words) for name, (label, words) in _FIGURES.items() if name in result]
    yield Table(("ms after the end of prefill", *_PERCENTILES, ""), rows)
    yield Words(f"hidden behind prefill: {result['hidden_share']:.1%} of the bytes (median request)")
    if result["prefix_reuse"]:
        share = f"{result['reused_share']:.1%}"
        yield Words(f"prefix reuse: {share} of the bytes were at decode and did not move")
    yield from shown.limits(result)
    yield shown.cost(result)
    memory = ", ".join(f"{role} {mib:.0f} MiB" for role, mib in result["rss_mib"].items())
    yield Words(f"resident memory: {memory}")


def page(result: Message, handovers: list[Handover]) -> Iterator[Part]:
    """Yields the parts of the page; of a failed run what was seen before."""
    if handovers:
        yield from _timeline(handovers)
    yield Heading("figures")
    if result["verified"]:
        yield from parts(result)
    else:
        yield Words(f"check failed: {result['failure']}", "bad")


def _timeline(handovers: list[Handover]) -> Iterator[Part]:
    from kvxfer.bench.report.plots import Bar, bars

    shown_ones = handovers[:_MAX_ROWS]
    labels = [f"{one.request}: {one.num_tokens} tokens" for one in shown_ones]
    yield Heading("timeline")
    rows = []
    for label, one in zip(labels, shown_ones, strict=True):
        at = one.stages_ms()
        begin = min((one.released_ns[0] - one.prefill_end_ns) / 1e6, at["post"], 0.0)
        segments = [(begin, 0.0, "prefill"), (at["first_layer"], at["last_layer"], "layers arrive")]
        points = [(at["notification"], "notification"), (at["decode_may_start"], "decode may start")]
        rows.append(Bar(label, segments, points))
    yield Figure(
        bars(rows, "ms after the end of prefill"),
        "Each request from its first event on; 0 is the end of its prefill. What lies to the left of 0 is "
        "hidden behind prefill.",
    )
    if len(handovers) > _MAX_ROWS:
        yield Words(f"the first {_MAX_ROWS} of {len(handovers)} requests", "dim")
    start_ns = min(one.arrival_ns for one in handovers)
    rows = []
    for label, one in zip(labels, shown_ones, strict=True):
        may_start_ns = max(one.decode_may_start_ns, one.prefill_end_ns)
        ends = [one.arrival_ns, one.asked_ns, one.prefill_end_ns, may_start_ns]
        at_s = [(end - start_ns) / 1e9 for end in ends]
        names = ("waits for room", "asked for until the end of prefill", "until decode may start")
        rows.append(Bar(label, list(zip(at_s, at_s[1:], names, strict=False))))
    yield Figure(bars(rows, "s"), "All requests on one clock, from the first arrival on.")
