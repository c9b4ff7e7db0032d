"""``kvxfer trace``: one request's course through router, engines and both ends of its transfers."""

from __future__ import annotations

import json as json_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.cli.asking import (
    FAILED,
    CaFileOption,
    JsonOption,
    TokenFileOption,
    asking,
    console,
    in_time,
    plain,
    print_json,
)

if TYPE_CHECKING:
    from kvxfer.control import schema

# Details in the table, which must not be wider than a screen.
_DETAILS = ("blocks", "bytes", "rails", "gen_ai.request.id", "gen_ai.usage.prompt_tokens")


def trace(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="The request's id, its trace's id, or a unique part of its id."
        ),
    ],
    daemon: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL|SOCKET",
            help="A daemon to ask; may be repeated. Default: KVXFER_DAEMON_URL, else this user's.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a file for https://ui.perfetto.dev.")
    ] = None,
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Show the course of one request: transfers with their stages, and spans of engines and routers.

    Programs send their spans to a daemon: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=https://NODE:7380/v1/traces.
    Rows are ordered by their start, by the clocks of their hosts.

    kvxfer trace cmpl-7f3a --daemon https://node-a:7380 --daemon https://node-b:7380 --out request.json
    """
    rows = _ask(request, daemon or [""], token_file, ca_file)
    if out is not None:
        from kvxfer.control.traces.perfetto import perfetto_of

        out.write_text(json_of.dumps(perfetto_of(rows)))
    if json:
        for row in rows:
            print_json(row)
    else:
        _print(rows)


def _ask(request: str, daemons: list[str], token_file: str, ca_file: str) -> list[schema.TraceRow]:
    """Returns rows of all daemons, without duplicates."""
    from kvxfer.control.client.client_error import ControlError

    found: dict[tuple[str, str, str, float], schema.TraceRow] = {}
    unknown: ControlError | None = None
    for place in daemons:
        with asking(place, token_file, ca_file) as client:
            try:
                told = client.get_request_trace(request)
            except ControlError as error:
                if error.code != "not-found":
                    raise
                unknown = error
                continue
        for row in told.rows:
            found.setdefault((row.process, row.lane, row.name, row.started_at_s), row)
    if not found and unknown is not None:
        typer.echo(f"kvxfer: {unknown}", err=True)
        raise typer.Exit(FAILED)
    return sorted(found.values(), key=lambda row: (row.started_at_s, row.depth))


def _print(rows: list[schema.TraceRow]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("AT", "TOOK", "WHERE", "WHAT", "DETAILS"):
        table.add_column(name, justify="right" if name in ("AT", "TOOK") else "left", overflow="fold")
    for row in rows:
        at = in_time((row.started_at_s - rows[0].started_at_s) * 1e6)
        details = ", ".join(f"{key} {row.details[key]}" for key in _DETAILS if key in row.details)
        what = "  " * row.depth + plain(row.name)
        cells = (at, in_time(row.took_us), plain(row.process), what, plain(row.error or details))
        table.add_row(*map(Text, cells))
    console().print(table)
