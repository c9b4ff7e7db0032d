"""Every command of ``kvxfer`` in one place, and what its exit status means."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

import kvxfer
from kvxfer.bench.errors import BenchError
from kvxfer.cli import help_text
from kvxfer.errors import KvxferError

# 0: done; 1: a check failed; 2: it could not run as asked.
_CANNOT_RUN = 2
_INTERRUPTED = 130

_PANEL = "A node's daemon"


@dataclass(frozen=True, slots=True)
class _Command:
    """``found`` is ``module:function``, or ``module:app`` of a group, in `kvxfer.cli`."""

    name: str
    found: str
    panel: str | None = _PANEL


#: Each is a module that loads what it needs; the other commands' modules then are not loaded.
_COMMANDS = (
    _Command("bench", "bench:build", None),
    _Command("doctor", "doctor:doctor", None),
    _Command("serve", "serve:serve", None),
    _Command("agents", "agent_commands:agents"),
    _Command("regions", "agent_commands:regions"),
    _Command("peers", "agent_commands:peers"),
    _Command("transfers", "transfer_commands:transfers"),
    _Command("trace", "trace_command:trace"),
    _Command("tokens", "token_commands:tokens"),
    _Command("drain", "drain_command:drain"),
    _Command("settings", "settings:settings"),
    _Command("move", "move:move"),
    _Command("top", "top:top"),
    _Command("leases", "lease_commands:app"),
    _Command("pages", "page_commands:app"),
)


def build(words: Sequence[str] = ()) -> typer.Typer:
    """Returns all commands, or the one that the words of a command line begin with.

    Loading one takes a third of what loading all takes.
    """
    app = typer.Typer(
        name="kvxfer",
        help="Moves KV-cache pages between LLM inference processes.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_common)
    for command in [each for each in _COMMANDS if each.name in words[:1]] or _COMMANDS:
        module, _, name = command.found.partition(":")
        if command.name == "bench":
            _add_bench(app, words[1:])
            continue
        found = getattr(importlib.import_module(f"kvxfer.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=command.name, rich_help_panel=command.panel)
        else:
            app.command(command.name, rich_help_panel=command.panel)(found)
    help_text.complete(app)
    return app


def _add_bench(app: typer.Typer, words: Sequence[str]) -> None:
    try:
        from kvxfer.cli import bench

        app.add_typer(bench.build(words), name="bench")
    except ImportError as error:
        # The doctor works without native modules, and reports that they do not load.
        reason = f"benchmarks need native modules that do not load ({error}): kvxfer doctor says what to do"

        @app.command("bench", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
        def bench_cannot_run() -> None:
            """Measures page moves, where the native modules load: see kvxfer doctor."""
            raise BenchError(reason)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvxfer.__version__)
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run(arguments: list[str] | None) -> int:
    """Runs one command; known errors become one line on stderr and a status."""
    try:
        build(sys.argv[1:] if arguments is None else arguments)(args=arguments, prog_name="kvxfer")
    except (BenchError, KvxferError) as error:
        print(f"kvxfer: {error}", file=sys.stderr)
        return _CANNOT_RUN
    except ModuleNotFoundError as error:
        print(f"kvxfer: this needs {error.name}: pip install 'kvxfer[bench,control]'", file=sys.stderr)
        return _CANNOT_RUN
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else _CANNOT_RUN
    return 0
