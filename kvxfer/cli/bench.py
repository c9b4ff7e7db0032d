"""``kvxfer bench``: options in, progress and a table or a line of JSON out.

A command is a dataclass of options (`kvxfer.bench.run.options`), a function that runs it, and one that shows
its result.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import document, noise
from kvxfer.bench.report.document import Words
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say
from kvxfer.bench.run.options import Option, declared, flag
from kvxfer.cli.help_text import is_unit, value_name

_CHECK_FAILED = 1
_BASELINE_FAILED = 2

_REPORT = "report"

# Up to this length, choices stand beside an option as its value.
_SHORT_CHOICES = 24


class Format(enum.StrEnum):
    """How a result is shown."""

    TABLE = "table"
    JSON = "json"


_FORMAT = Annotated[
    Format,
    typer.Option("--format", metavar="table|json", help="For people, or one JSON object on one line."),
]
_DETAILS = Annotated[
    bool, typer.Option("--details", help="Print the table of all figures instead of three sentences.")
]
_OUT = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Keep the result, the machine's facts and its noise in this directory."),
]


@dataclass(frozen=True, slots=True)
class _Command:
    """All but the name are ``module:name``, of modules of `kvxfer.bench` that are loaded when needed.

    ``run`` takes the options and a callback for progress, and returns the result. Without ``parts`` it takes
    the options and returns an exit status.
    """

    name: str
    options: str
    run: str
    parts: str = ""
    #: Shown instead of ``parts`` where ``--details`` is not asked for.
    sentences: str = ""
    #: Called with the options before ``run`` is loaded.
    prepare: str = ""


_COMMANDS = (
    _Command("pages", "pages.measure:PagesOptions", "pages.measure:run", "pages.measure:parts"),
    _Command(
        "handover",
        "handover.measure:HandoverOptions",
        "handover.measure:run",
        "handover.shown:parts",
        "handover.shown:sentences",
    ),
    _Command("latency", "latency.measure:LatencyOptions", "latency.measure:run", "latency.measure:parts"),
    _Command("compare", "compare.measure:CompareOptions", "compare.measure:run", "compare.measure:parts"),
    _Command(
        "serving",
        "serving.options:ServingOptions",
        "serving.measure:run",
        "serving.shown:parts",
        prepare="serving.systems:enter_environment",
    ),
    _Command(
        "abandoned",
        "serving.options:AbandonedOptions",
        "serving.abandoned:run",
        "serving.abandoned:parts",
        prepare="serving.systems:enter_environment",
    ),
    _Command("parking", "parking.measure:ParkingOptions", "parking.measure:run", "parking.measure:parts"),
    _Command("store", "store.measure:StoreOptions", "store.measure:run", "store.measure:parts"),
    _Command("daemon", "daemon.measure:DaemonOptions", "daemon.measure:run", "daemon.measure:parts"),
    _Command("plan", "plan.measure:PlanOptions", "plan.measure:run", "plan.measure:parts"),
    _Command("setup", "setup.measure:SetupOptions", "setup.measure:run", "setup.measure:parts"),
    _Command("scale", "scale.measure:ScaleOptions", "scale.measure:run", "scale.measure:parts"),
    _Command(
        "trigger", "latency.delays:TriggerOptions", "latency.delays:run_trigger", "latency.delays:parts"
    ),
    _Command(
        "commands", "latency.delays:CommandsOptions", "latency.delays:run_commands", "latency.delays:parts"
    ),
    _Command(
        "instructions",
        "plan.instructions:InstructionsOptions",
        "plan.instructions:run",
        "plan.instructions:parts",
    ),
    _Command("gpu", "gpu.check:GpuOptions", "gpu.check:run"),
    _Command("router", "engines.options:RouterOptions", "engines.router:run"),
    _Command("demo", "engines.options:DemoOptions", "engines.demo:run"),
    _Command("cluster", "engines.options:ClusterOptions", "cluster.picture:run"),
)


def _load(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"kvxfer.bench.{module}"), function)


def build(words: Sequence[str] = ()) -> typer.Typer:
    """Returns all benchmarks, or the one that the words of a command line begin with."""
    app = typer.Typer(
        help="Measures page moves against this machine's limits.",
        epilog="Exit status: 0: measured, and every byte was right. 1: a check failed. 2: it could not run "
        "as asked, or other software of a comparison failed. 130: interrupted. `gpu` ends with 3 if there "
        "is no GPU.",
        no_args_is_help=True,
    )
    if words[:1] != [_REPORT]:
        for command in [each for each in _COMMANDS if each.name in words[:1]] or _COMMANDS:
            _add(app, command)
    app.command(_REPORT)(report_runs)
    return app


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _parameters(command: _Command, taken: type[Any]) -> Iterator[inspect.Parameter]:
    """Yields the parameters from which typer makes the options that are taken."""
    known = declared(taken)
    for field in fields(taken):
        kind, option = known[field.name]
        default = ... if field.default is MISSING else field.default
        if isinstance(default, tuple):
            default = [",".join(map(str, default))] if default else []
        value = _value_name(field.name, kind, option)
        if kind in (tuple[str, ...], tuple[int, ...]):
            kind = list[str]
        told = typer.Option(
            flag(field.name),
            help=option.help,
            hidden=option.hidden,
            metavar=value,
            autocompletion=_completing(option),
        )
        yield _parameter(field.name, Annotated[kind, told], default)
    if command.parts:
        if command.sentences:
            yield _parameter("details", _DETAILS, False)
        yield _parameter("format", _FORMAT, Format.TABLE)
        yield _parameter("out", _OUT, None)


def _value_name(name: str, kind: Any, option: Option) -> str | None:
    """Returns what the help calls a value: the choices if they are few, else a noun."""
    if kind is bool:
        return None
    several = get_origin(kind) in (list, tuple)
    choices = "|".join(option.one_of)
    if not several and choices and len(choices) <= _SHORT_CHOICES:
        return choices
    noun = option.value or value_name(name)
    if not option.value and (kind is int or kind == tuple[int, ...]) and not is_unit(noun):
        noun = "N"
    return f"{noun},..." if several else noun


def _completing(option: Option) -> Callable[[str], list[str]] | None:
    if not option.one_of:
        return None

    def complete(incomplete: str) -> list[str]:
        # Of several values separated by commas, the last is completed.
        before, comma, begun = incomplete.rpartition(",")
        return [before + comma + choice for choice in option.one_of if choice.startswith(begun)]

    return complete


def _items(name: str, kind: type[Any], told: list[str]) -> tuple[Any, ...]:
    """Returns an option's values, separated by commas or given more than once."""
    texts = [each.strip() for text in told for each in text.split(",") if each.strip()]
    try:
        return tuple(kind(text) for text in texts)
    except ValueError:
        raise BenchError(f"{flag(name)} takes numbers separated by commas, not {','.join(texts)}") from None


def _add(app: typer.Typer, command: _Command) -> None:
    taken: type[Any] = _load(command.options)
    known = declared(taken)

    def body(**told: Any) -> None:
        common = {name: told.pop(name, None) for name in ("format", "out")}
        details = told.pop("details", True)
        if not command.parts and "out" in known:
            told["out"] = common["out"]
        lists = {
            name: _items(name, get_args(known[name][0])[0], value)
            for name, value in told.items()
            if isinstance(value, list)
        }
        options = taken(**{**told, **lists})
        if command.parts:
            _measure(command, options, details=details, **common)
        elif status := _load(command.run)(options):
            raise typer.Exit(status)

    body.__signature__ = inspect.Signature(list(_parameters(command, taken)))  # type: ignore[attr-defined]
    body.__doc__ = taken.__doc__
    app.command(command.name)(body)


def _measure(command: _Command, options: Any, *, details: bool, format: Format, out: Path | None) -> None:
    """Runs one benchmark, shows its progress, measures the noise, and keeps and shows the result."""
    if out is not None:
        from kvxfer.bench.report import results

        results.check_directory(out)
    if command.prepare:
        _load(command.prepare)(options)
    run = _load(command.run)
    before = noise.Sample.take()
    with _watching(command.name) as progress:
        result: Message = run(options, progress)
    # A benchmark that ends its own servers measures the noise before that.
    beside = result.pop("noise", None) or noise.between(before, noise.Sample.take())
    if out is not None:
        results.keep(out, result, beside)
    if format is Format.JSON:
        print(json.dumps(result), flush=True)
    else:
        document.print_parts(_shown(command, result, beside, details=details))
    if not result["verified"]:
        raise typer.Exit(_CHECK_FAILED)
    if result.get("failures"):
        raise typer.Exit(_BASELINE_FAILED)


def _shown(
    command: _Command, result: Message, beside: Message | None, *, details: bool
) -> Iterator[document.Part]:
    warning = noise.in_words(beside)
    if command.sentences and not details and warning:
        # Before the sentences, which come last.
        yield Words(warning, "warn")
        warning = ""
    if result["verified"] or "systems" in result:
        yield from _load(command.parts if details else command.sentences)(result)
    if not result["verified"]:
        yield Words(f"check failed: {result['failure']}", "bad")
    if warning:
        yield Words(warning, "warn")


@contextmanager
def _watching(title: str) -> Iterator[Say]:
    """Shows progress on stderr: a bar on a terminal, otherwise one line per step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as ProgressBar

    def say(at: Progress) -> None:
        print(f"{title} {at.done}/{at.total}: {at.words}", file=sys.stderr, flush=True)

    console = Console(stderr=True)
    if not console.is_terminal:
        yield say
        return
    columns = (SpinnerColumn(), TextColumn("{task.fields[title]}"), BarColumn(), MofNCompleteColumn())
    words = TextColumn("{task.description}")
    with ProgressBar(*columns, TimeElapsedColumn(), words, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, title=title)
        yield lambda at: bar.update(task, completed=at.done, total=at.total, description=at.words)


def report_runs(
    first: Annotated[Path, typer.Argument(metavar="DIR", help="Where --out kept results.")],
    second: Annotated[
        Path | None, typer.Argument(metavar="DIR2", help="Another directory, compared with the first.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report with plots, as an HTML page.")
    ] = None,
) -> None:
    """Show many runs in tables, or say whether the runs in a second directory are faster.

    kvxfer bench report results

    kvxfer bench report before after --html report.html
    """
    from kvxfer.bench.report import measure as report_of
    from kvxfer.bench.report import page, results

    folders = [first] if second is None else [first, second]
    names, found = [str(folder) for folder in folders], list(map(results.read, folders))
    if html is None:
        document.print_parts(report_of.parts(names, found))
    else:
        page.write(html, "kvxfer bench report", report_of.with_plots(names, found))
        print(f"the report is in {html}", file=sys.stderr)
