"""What a comparison is shown as."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.bench.compare.measure import FIGURES, OURS
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, Table, Words, spread_in_words
from kvxfer.bench.run.channel import Message


def parts(result: Message) -> Iterator[Part]:
    """Yields the systems, how many times better kvxfer is, and what a reader has to know."""
    yield Words(_title(result), "bold")
    figures = FIGURES[result["work"]]
    systems = result["systems"]
    if systems:
        rows = [
            (figure.replace("_", " "), *(spread_in_words(system[figure]) for system in systems.values()))
            for figure in figures
        ]
        # A row for a figure: there are more figures than systems.
        yield Table(("median (min to max)", *systems), rows)
    yield from shown.ratios(result, OURS, figures)
    for name, system in systems.items():
        settings = ", ".join(f"{key}={value}" for key, value in system["settings"].items())
        words = f"{name} {system['version']}: {system['path']}"
        yield Words(f"{words}; {settings}" if settings else words)
    yield from (Words(note, "dim") for note in result["notes"])
    for name, words in result["failures"].items():
        yield Words(f"{name} failed and was left out from there: {words}", "bad")
    if result["verified"] and systems and result["work"] == "pages":
        # `latency` looks at every fiftieth write; `setup` at the first one.
        yield Words("every byte checked where it arrived, in every system and round")


def _title(result: Message) -> str:
    over = f"over {result['transport']}"
    work = {
        "pages": f"{result['op']} {over}: {result['total_mib']} MiB in pages of {result['block_kib']} KiB",
        "latency": f"latency {over}: a write of {result['nbytes']} bytes and its notification seen at the "
        "far end, both polling",
        "setup": f"set-up {over}: two fresh processes, one agent in each",
    }[result["work"]]
    rounds = f"{len(result['rounds_measured'])} of {result['rounds']} rounds of {result['iterations']}"
    return f"{work}; {rounds}, interleaved"
