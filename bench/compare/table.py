"""The table of a comparison."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvxfer.bench.compare.measure import FIGURES, OURS
from kvxfer.bench.run.channel import Message

_LABELS = {
    "gb_per_s": "GB/s",
    "total_ms": "total ms",
    "post_ms": "post ms",
    "cpu_s_per_gib": "CPU s/GiB",
    "p50_us": "p50 us",
    "p99_us": "p99 us",
    "import_ms": "import ms",
    "create_ms": "create ms",
    "register_ms": "register ms",
    "connect_ms": "connect ms",
    "first_write_ms": "1st write ms",
    "connect_and_write_ms": "both, ms",
    "idle_cpu_cores": "idle cores",
    "rss_mib": "RSS MiB",
    "threads": "threads",
}


def print_comparison(console: Console, result: Message) -> None:
    """Prints the systems, how many times better kvxfer is, and what a reader has to know."""
    console.print(_title(result))
    if result["systems"]:
        console.print(_figures(result))
    if result["ratios"]:
        console.print(
            "[bold]how many times better kvxfer is[/]: median (min to max) of the rounds; below 1 it is not"
        )
        console.print(_ratios(result))
    for name, system in result["systems"].items():
        settings = ", ".join(f"{key}={value}" for key, value in system["settings"].items())
        console.print(f"{name} {system['version']}: {system['path']}" + (f"; {settings}" if settings else ""))
    for note in result["notes"]:
        console.print(f"[dim]{note}[/]", soft_wrap=True)
    _print_end(console, result)


def _title(result: Message) -> str:
    over = f"over {result['transport']}[/]"
    if result["work"] == "pages":
        work = (
            f"{result['op']} {over}: {result['total_mib']} MiB in pages of {result['block_kib']} KiB, "
            f"{result['pattern']}"
        )
    elif result["work"] == "latency":
        work = (
            f"latency {over}: a write of {result['nbytes']} bytes and its notification seen at the far "
            "end, both polling"
        )
    else:
        work = f"set-up {over}: two fresh processes, one agent in each"
    rounds = f"{len(result['rounds_measured'])} of {result['rounds']} rounds of {result['iterations']}"
    return f"[bold]{work}; {rounds}, interleaved"


def _figures(result: Message) -> Table:
    """A row for a figure: there are more figures than systems."""
    table = Table("median (min to max)", *result["systems"])
    for figure in FIGURES[result["work"]]:
        table.add_row(_LABELS[figure], *(_spread(system[figure]) for system in result["systems"].values()))
    return table


def _ratios(result: Message) -> Table:
    table = Table(f"{OURS} beside", *result["ratios"])
    for figure in FIGURES[result["work"]]:
        row = (figures.get(figure) for figures in result["ratios"].values())
        table.add_row(_LABELS[figure], *("-" if values is None else _spread(values) for values in row))
    return table


def _spread(values: Message) -> str:
    return " ".join((_number(values["median"]), f"({_number(values['min'])} to {_number(values['max'])})"))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _print_end(console: Console, result: Message) -> None:
    for name, words in result["failures"].items():
        console.print(f"[bold red]{name} failed[/] and was left out from there: ", end="")
        console.print(words, markup=False, soft_wrap=True)
    if result["interrupted"]:
        console.print("[bold]interrupted[/]: this is what was measured until then")
    if not result["verified"]:
        console.print("[bold red]check failed[/]: ", end="")
        console.print(result["failure"], markup=False, soft_wrap=True)
    elif result["systems"] and result["work"] == "pages":
        # `latency` looks at every fiftieth write; `setup` at the first one.
        console.print("every byte checked where it arrived, in every system and round")
