"""Results for people and for programs, and progress while they come about."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from kvxfer.bench.compare import table as compare_report
from kvxfer.bench.handover.stages import STAGES
from kvxfer.bench.report import figures as figures_report
from kvxfer.bench.report import noise, runs_table
from kvxfer.bench.report.results import Found
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.limit import DESCRIPTIONS
from kvxfer.bench.run.progress import Progress
from kvxfer.bench.run.stats import MIB
from kvxfer.bench.serving import table as serving_report

# Of tables in files and pipes, where nobody says how wide a line may be.
_WIDTH = 120


@contextmanager
def watching(title: str) -> Iterator[Callable[[Progress], None]]:
    """Shows progress on stderr: a bar on a terminal, a line a step elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda at: print(f"{title} {at.done}/{at.total}: {at.words}", file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.fields[title]}"), BarColumn(), MofNCompleteColumn())
    with ProgressBar(
        *columns, TimeElapsedColumn(), TextColumn("{task.description}"), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=None, title=title)
        yield lambda at: bar.update(task, completed=at.done, total=at.total, description=at.words)


def print_json(result: Message) -> None:
    """Prints one object on one line."""
    print(json.dumps(result), flush=True)


def print_table(result: Message, beside: Message | None = None) -> None:
    """Prints a result for people, with the words that explain it, and the noise ``beside`` it if notable."""
    console = _console()
    if result["bench"] == "compare":
        compare_report.print_comparison(console, result)
    elif result["bench"] == "serving":
        serving_report.print_serving(console, result)
    elif not result["verified"]:
        console.print(f"[bold red]check failed[/]: {result['failure']}", soft_wrap=True)
    elif "src_layout" in result and result["bench"] == "pages":
        _print_layouts(console, result)
    elif result["bench"] == "pages":
        _print_pages(console, result)
    elif result["bench"] == "handover":
        _print_handover(console, result)
    else:
        figures_report.print_figures(console, result)
    if result.get("interrupted") and result["bench"] != "compare":
        console.print("[bold]interrupted[/]: this is what was measured until then")
    if words := noise.in_words(beside):
        console.print(f"[yellow]{words}[/]", soft_wrap=True)


def print_runs(folders: tuple[Path, Path | None], found: list[Found]) -> None:
    """Prints the runs of one directory, or of two side by side."""
    first, second = folders
    if second is None:
        runs_table.print_one(_console(), str(first), *found)
    else:
        runs_table.print_two(_console(), (str(first), str(second)), *found)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _print_pages(console: Console, result: Message) -> None:
    console.print(
        f"[bold]{result['op']} over {result['transport']}[/]: {result['num_pages']} pages of "
        f"{result['block_kib']} KiB, {result['pattern']}, {result['memory']} memory"
    )
    _print_spreads(console, result)
    _print_limits(console, result)
    _print_cost(console, result)


def _print_layouts(console: Console, result: Message) -> None:
    console.print(
        f"[bold]{result['op']} over {result['transport']}, {result['src_layout']} -> "
        f"{result['dst_layout']}[/]: {result['num_tokens']} tokens in {result['layers']} layers of "
        f"{result['shape']}, to one rank from {result['num_sources']}, {result['pattern']}, "
        f"{result['memory']} memory; {result['src_nbytes'] / MIB:.1f} MiB at the source, "
        f"{result['dst_nbytes'] / MIB:.1f} at the destination",
        soft_wrap=True,
    )
    console.print(f"[dim]{result['explain']}[/]", soft_wrap=True)
    _print_spreads(console, result)
    console.print(
        f"plain copy: {result['plain_gb_s']:.2f} GB/s (kvxfer, as many bytes between equal layouts); "
        f"[bold]ratio to it {result['ratio_to_plain']:.2f}[/]"
    )
    _print_limits(console, result)
    if "ratio_to_piecewise" in result:
        console.print(
            f"piece by piece: {result['piecewise_gb_s']:.2f} GB/s (a message for each of "
            f"{result['piecewise_pieces']} pieces, {result['piecewise_nbytes'] / MIB:.1f} MiB, one loopback "
            f"TCP stream); [bold]ratio to it {result['ratio_to_piecewise']:.1f}[/]"
        )
    _print_cost(console, result, "bytes checked: all after the warm-up, then a layer of each transfer")


def _print_spreads(console: Console, result: Message) -> None:
    table = Table("", "min", "median", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, unit in (("total_ms", "ms"), ("gb_per_s", "GB/s")):
        table.add_row(unit, *(f"{result[name][key]:.2f}" for key in ("min", "median", "max")))
    console.print(table)


def _print_handover(console: Console, result: Message) -> None:
    mib = result["total_nbytes"] / (1 << 20)
    console.print(
        f"[bold]{result['mode']} over {result['transport']}[/]: {result['requests']} requests of "
        f"{result['trace']}, {result['tokens']} tokens of {result['model']}, {mib:.0f} MiB in "
        f"{result['num_pages']} pages of {result['page_nbytes'] / 1024:g} KiB"
    )
    if result["prefills"] > 1 or result["decodes"] > 1:
        console.print(f"{result['prefills']} prefill and {result['decodes']} decode processes, in turn")
    table = Table("ms after the end of prefill", "p50", "p90", "p99", "")
    for column in table.columns[1:4]:
        column.justify = "right"
    for stage, meaning in STAGES.items():
        row = result["stages_ms"][stage]
        table.add_row(
            stage.replace("_", " "),
            *(f"{row[key]:.2f}" for key in ("p50", "p90", "p99")),
            f"[dim]{meaning}[/]",
        )
    table.add_section()
    for name, label, meaning in (
        ("limit_last_layer_ms", "(limit: last layer)", "the same layers, moved at the limit's rate"),
        ("transfer_ms", "transfer, ms", "first layer movable to last layer in place"),
        ("gb_per_s", "transfer, GB/s", "paced by prefill where layers are pushed"),
    ):
        row = result[name]
        table.add_row(label, *(f"{row[key]:.2f}" for key in ("p50", "p90", "p99")), f"[dim]{meaning}[/]")
    if "queue_ms" in result:
        table.add_section()
        for name, label, meaning in (
            ("queue_ms", "waited", "from its arrival until decode had room"),
            ("arrival_to_decode_ms", "arrival to decode", "waiting, prefill and the handover"),
        ):
            row = result[name]
            table.add_row(label, *(f"{row[key]:.2f}" for key in ("p50", "p90", "p99")), f"[dim]{meaning}[/]")
    console.print(table)
    console.print(f"hidden behind prefill: {result['hidden_share']:.1%} of the bytes (median request)")
    if result["prefix_reuse"]:
        console.print(
            f"prefix reuse: {result['reused_share']:.1%} of the bytes were at decode and did not move"
        )
    _print_limits(console, result)
    _print_cost(console, result)
    memory = ", ".join(f"{role} {mib:.0f} MiB" for role, mib in result["rss_mib"].items())
    console.print(f"resident memory: {memory}")


def _print_limits(console: Console, result: Message) -> None:
    limit = result["limit"]
    # A pushed layer cannot move before it is computed, whoever moves it.
    paced = ", prefill's pace counted for both" if result.get("mode") == "push" else ""
    console.print(
        f"limit: {limit['gb_per_s']:.2f} GB/s ({DESCRIPTIONS[limit['name']]}); "
        f"[bold]ratio to it {result['limit_ratio']:.2f}[/]{paced}"
    )
    if "limit_nt" in result:
        other = result["limit_nt"]
        ratio = f"; ratio to it {result['limit_nt_ratio']:.2f}" if "limit_nt_ratio" in result else ""
        console.print(f"       {other['gb_per_s']:.2f} GB/s ({DESCRIPTIONS[other['name']]}){ratio}")


def _print_cost(console: Console, result: Message, checked: str = "every byte checked") -> None:
    post = f"post {result['post_ms']:.3f} ms, " if "post_ms" in result else ""
    # A sentence that somebody may search for stays on one line, however long the machine makes it.
    console.print(
        f"{post}{result['cpu_s_per_gib']:.3f} CPU s/GiB at both ends, rails {', '.join(result['rails'])}, "
        f"copy kernel {result['copy_kernel']}, {result['page_kind']} memory pages; {checked}",
        soft_wrap=True,
    )
