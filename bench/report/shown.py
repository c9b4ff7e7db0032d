"""Lines that results of several benchmarks have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvxfer.bench.report.document import Part, Table, Words, spread_in_words
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.limit import DESCRIPTIONS


def spreads(result: Message) -> Table:
    """Returns the table of times and rates."""
    rows = [
        (unit, *(f"{result[name][key]:.2f}" for key in ("min", "median", "max")))
        for name, unit in (("total_ms", "ms"), ("gb_per_s", "GB/s"))
    ]
    return Table(("", "min", "median", "max"), rows)


def limits(result: Message) -> Iterator[Part]:
    """Yields a line for each limit, with the ratio to it."""
    # A pushed layer cannot move before it is computed, whoever moves it.
    paced = ", both at prefill's pace" if result["bench"] == "handover" else ""
    for key in ("limit", "limit_nt"):
        if key in result:
            ratio = f"; ratio to this {result[f'{key}_ratio']:.2f}" if f"{key}_ratio" in result else ""
            name, rate = result[key]["name"], result[key]["gb_per_s"]
            yield Words(f"limit: {rate:.2f} GB/s ({DESCRIPTIONS[name]}){ratio}{paced if ratio else ''}")


def cost(result: Message, checked: str = "every byte checked") -> Words:
    """Returns what it took of the processors, and by which way."""
    post = f"post {result['post_ms']:.3f} ms, " if "post_ms" in result else ""
    return Words(
        f"{post}{result['cpu_s_per_gib']:.3f} CPU s/GiB at both ends, rails {', '.join(result['rails'])}, "
        f"copy kernel {result['copy_kernel']}, {result['page_kind']} memory pages; {checked}"
    )


def arguments(result: Message, *leave_out: str) -> Words:
    """Returns what a result was measured with: what is no figure of it."""
    hidden = {"bench", "verified", *leave_out}
    shown = (f"{name.replace('_', ' ')} {value}" for name, value in result.items() if name not in hidden)
    return Words(f"{result['bench']}: {', '.join(shown)}", "bold")


def ratios(result: Message, ours: str, figures: Iterable[str]) -> Iterator[Part]:
    """Yields how many times better ours is than the other systems of a comparison, figure by figure."""
    others = result["ratios"]
    if others:
        rows = [
            (figure.replace("_", " "), *(spread_in_words(of.get(figure)) for of in others.values()))
            for figure in figures
        ]
        yield Words("how many times better kvxfer is: median (min to max) of the rounds; below 1 it is worse")
        yield Table((f"{ours} beside", *others), rows)
