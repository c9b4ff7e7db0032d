"""Every command of ``kvxfer`` in one place, and what its exit status means."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvxfer
from kvxfer.bench.errors import BenchError
from kvxfer.cli import (
    agent_commands,
    doctor,
    drain_command,
    lease_commands,
    move,
    page_commands,
    serve,
    settings,
    token_commands,
    top,
    trace_command,
    transfer_commands,
)
from kvxfer.errors import KvxferError

# 0: done; 1: a check failed; 2: it could not run as asked.
_CANNOT_RUN = 2
_INTERRUPTED = 130

app = typer.Typer(
    name="kvxfer",
    help="Moves KV-cache pages between LLM inference processes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _add_bench() -> None:
    try:
        from kvxfer.cli import bench
    except ImportError as error:
        # The doctor works without native modules, and reports that they do not load.
        words = f"benchmarks need native modules that do not load ({error}): kvxfer doctor says what to do"

        @app.command("bench", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
        def bench_cannot_run() -> None:
            """Measures page moves, where the native modules load: see kvxfer doctor."""
            raise BenchError(words)

        return
    app.add_typer(bench.app, name="bench")


_add_bench()
app.command()(doctor.doctor)
app.command()(serve.serve)
_PANEL = "A node's daemon"
for _command in (
    agent_commands.agents,
    agent_commands.regions,
    agent_commands.peers,
    transfer_commands.transfers,
    trace_command.trace,
    token_commands.tokens,
    drain_command.drain,
    settings.settings,
    move.move,
    top.top,
):
    app.command(rich_help_panel=_PANEL)(_command)
app.add_typer(lease_commands.app, name="leases", rich_help_panel=_PANEL)
app.add_typer(page_commands.app, name="pages", rich_help_panel=_PANEL)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvxfer.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run(arguments: list[str] | None) -> int:
    """Runs one command; known errors become one line on stderr and a status."""
    try:
        app(args=arguments, prog_name="kvxfer")
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
