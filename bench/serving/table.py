"""The tables of `kvxfer bench serving`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvxfer.bench.run.channel import Message
from kvxfer.bench.serving.ratios import COMPARED
from kvxfer.bench.serving.stages import OWN, STAGES
from kvxfer.bench.serving.systems import OURS

_PERCENTILES = ("p50", "p90", "p99")
_STAGE_LABELS = {"to_decode": "to decode", "load": "load (own)"}
_OWN_LABELS = {"give_back": "give back"}


def print_serving(console: Console, result: Message) -> None:
    """Prints what every system did, stage by stage, and what a reader has to know."""
    console.print(_title(result), soft_wrap=True)
    systems: Message = result["systems"]
    if systems:
        console.print(_latencies(systems))
        console.print(_costs(systems))
    if result["ratios"]:
        console.print(
            "[bold]how many times better kvxfer is[/]: median (min to max) of the rounds; below 1 it is not"
        )
        console.print(_ratios(result["ratios"]))
    labels = {**_STAGE_LABELS, **_OWN_LABELS}
    for name, meaning in {**STAGES, **OWN}.items():
        console.print(f"  [dim]{labels.get(name, name)}: {meaning}[/]", soft_wrap=True)
    for name, system in systems.items():
        settings = ", ".join(f"{key}={value}" for key, value in system["settings"].items())
        console.print(f"{name}: {system['words']}" + (f"; {settings}" if settings else ""), soft_wrap=True)
        console.print(f"  [dim]{_tokens(result['tokens'][name])}[/]", soft_wrap=True)
    console.print(f"[dim]engines' logs: {result['logs']['folder']}[/]", soft_wrap=True)
    for name, words in result["failures"].items():
        console.print(f"[bold red]{name} was left out from there[/]: ", end="")
        console.print(words, markup=False, soft_wrap=True)
    if not result["verified"]:
        console.print(f"[bold red]check failed[/]: {result['failure']}", soft_wrap=True)


def _title(result: Message) -> str:
    arrivals = {
        "closed": f"{result['concurrency']} at a time",
        "poisson": f"{result['rate']:g} a second, at random",
        "trace": f"as in the trace, {result['speedup']:g} times as fast",
    }[result["arrivals"]]
    return (
        f"[bold]serving[/]: {result['requests']} requests of {result['trace']}, {arrivals}, "
        f"{result['prompt_tokens']} prompt tokens and up to {result['max_output_tokens']} answered each, "
        f"{result['rounds']} rounds; vLLM on the CPU, model {result['model']}; while one system is measured "
        "the engines of the others are stopped"
    )


def _latencies(systems: Message) -> Table:
    table = Table("ms: p50 p90 p99", *systems)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {"first_token_ms": "first token", "between_tokens_ms": "between tokens"}
    for figure, label in rows.items():
        table.add_row(f"[bold]{label}[/]", *(_row(one.get(figure)) for one in systems.values()))
    table.add_section()
    for stage in STAGES:
        cells = (_row(one.get("stages_ms", {}).get(stage)) for one in systems.values())
        table.add_row(_STAGE_LABELS.get(stage, stage), *cells)
    table.add_section()
    for part in OWN:
        if part != "load":
            cells = (_row(one.get("own_ms", {}).get(part)) for one in systems.values())
            table.add_row(_OWN_LABELS.get(part, part), *cells)
    table.add_section()
    table.add_row(
        "first request of all: first token",
        *(_single(one["first"].get("first_token_ms")) for one in systems.values()),
    )
    table.add_row(
        "first request of all: load",
        *(_single(one["first"].get("own_ms", {}).get("load")) for one in systems.values()),
    )
    return table


def _costs(systems: Message) -> Table:
    table = Table("median (min to max) of rounds", *systems)
    for column in table.columns[1:]:
        column.justify = "right"
    for figure, label in (
        ("output_tokens_per_s", "answered tokens/s"),
        ("prompt_tokens_per_s", "prompt tokens/s"),
        ("processor_s", "processor s of the engines"),
    ):
        table.add_row(label, *(_spread(one.get(figure)) for one in systems.values()))
    for role in ("prefill", "decode"):
        table.add_row(
            f"connector, us a step of {role}",
            *(_spread(one.get("step_us", {}).get(role)) for one in systems.values()),
        )
    table.add_section()
    table.add_row("idle, cores", *(f"{one['idle']['cores']:.3f}" for one in systems.values()))
    table.add_row(
        "idle, its busiest thread",
        *(
            f"{one['idle']['busiest_thread_cores']:.3f} {one['idle']['busiest_thread']}"
            for one in systems.values()
        ),
    )
    return table


def _ratios(ratios: Message) -> Table:
    table = Table(f"{OURS} beside", *ratios)
    for figure in COMPARED:
        table.add_row(figure.replace("_", " "), *(_spread(one.get(figure)) for one in ratios.values()))
    return table


def _tokens(tokens: Message) -> str:
    words = f"{tokens['requests']} requests, {tokens['handed_over']} handed over"
    if tokens["failed"]:
        words += f", {tokens['failed']} failed ({tokens['failure']})"
    if tokens["compared"]:
        words += f"; {tokens['equal']} of {tokens['compared']} answers have the tokens of one engine"
    return words


def _row(values: Message | None) -> str:
    return "-" if values is None else " ".join(_number(values[key]) for key in _PERCENTILES)


def _single(values: Message | None) -> str:
    return "-" if values is None else _number(values["p50"])


def _spread(values: Message | None) -> str:
    if values is None:
        return "-"
    return f"{_number(values['median'])} ({_number(values['min'])} to {_number(values['max'])})"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
