"""What ``kvxfer bench handover`` says of a result: sentences, and with ``--details`` tables."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.bench.handover.stages import STAGES
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, Table, Words, number
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.stats import MIB

_PERCENTILES = ("p50", "p90", "p99")


def sentences(result: Message) -> Iterator[Part]:
    """Yields what was moved, and three sentences on how it went."""
    ready = result["stages_ms"]["decode_may_start"]
    p50, p99 = (number(ready[name], 2) for name in ("p50", "p99"))
    yield _moved(result)
    yield Words(f"decode was ready {p50} ms after prefill ended (p50; p99 {p99} ms)")
    yield Words(f"{result['hidden_share']:.0%} of the bytes moved while prefill computed (median request)")
    yield Words("every byte checked")


def parts(result: Message) -> Iterator[Part]:
    """Yields the stages, the limits beside them, and what it cost."""
    yield _moved(result)

    def stage(label: str, values: Message, meaning: str) -> tuple[str | Words, ...]:
        return (label, *(_beside_the_end(values[key]) for key in _PERCENTILES), Words(meaning, "dim"))

    rows = [
        stage(name.replace("_", " "), values, STAGES[name]) for name, values in result["stages_ms"].items()
    ]
    rows.append(())
    rows.append(
        stage(
            "last layer, at the limit", result["limit_last_layer_ms"], "the same layers at the limit's rate"
        )
    )
    yield Table(("ms before or after prefill ended", *_PERCENTILES, ""), rows)
    yield Words(f"moved while prefill computed: {result['hidden_share']:.1%} of the bytes (median request)")
    # A rate is the transfer's own only where prefill's pace does not hold it back.
    if not result["prefill_ms_per_layer"]:
        rate = ", ".join(f"{key} {result['gb_per_s'][key]:.2f}" for key in _PERCENTILES)
        yield Words(f"GB/s from the first layer's release until the last layer is in place: {rate}")
    yield from shown.limits(result)
    yield shown.cost(result)
    memory = ", ".join(f"{role} {mib:.0f} MiB" for role, mib in result["rss_mib"].items())
    yield Words(f"resident memory: {memory}")


def _moved(result: Message) -> Words:
    return Words(
        f"push over {result['transport']}: {result['requests']} requests of "
        f"{result['trace']}, {result['tokens']} tokens of {result['model']}, "
        f"{result['total_nbytes'] / MIB:.0f} MiB in "
        f"{result['num_pages']} pages of {result['page_nbytes'] / 1024:g} KiB",
        "bold",
    )


def _beside_the_end(ms: float) -> str:
    """A minus would read as a defect: what is hidden behind prefill comes before its end."""
    return f"{abs(ms):.2f} {'before' if ms < 0 else 'after'}"
