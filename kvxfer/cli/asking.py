"""Shared by commands that ask a daemon: which daemon, how answers are shown, and what errors say."""

from __future__ import annotations

import json as json_of
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvxfer.errors import invalid

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvxfer.control.client.rest_client import Client

DaemonOption = Annotated[
    str,
    typer.Option(
        "--daemon",
        metavar="URL|SOCKET",
        help="http(s)://host:port, or a unix socket. Default: KVXFER_DAEMON_URL, else this user's.",
    ),
]
TokenFileOption = Annotated[
    str, typer.Option(metavar="FILE", help="File with a token, for TCP. Default: KVXFER_TOKEN_FILE.")
]
CaFileOption = Annotated[str, typer.Option(metavar="FILE", help="Certificates to trust for https.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: one object per line.")]
AgentOption = Annotated[str, typer.Option(metavar="AGENT", help="Only of this agent: its id or name.")]
LimitOption = Annotated[int, typer.Option(metavar="N", min=1, help="How many at most.")]

#: Exit status: the goal was not reached. 2 is "could not run as asked" (app.py).
FAILED = 1
# Width of tables in files and pipes, which have no width.
_WIDTH = 160
# Columns of ids.
_WHOLE = frozenset({"ID", "TRANSFER", "LEASE"})
# What to do next, for errors whose detail does not say it.
_HINTS = {
    "unauthorized": "name a file with a token: --token-file, or KVXFER_TOKEN_FILE",
    "forbidden": "ask an admin for a token with that right (kvxfer tokens --help)",
    "draining": "kvxfer drain --undo ends the drain",
}

Row = TypeVar("Row", bound="BaseModel")


def lists_alone(context: typer.Context) -> bool:
    """Whether a noun stands without a verb, which lists its things.

    Raises
    ------
    UsageError
        ``invalid-argument``: options stand before the verb, where they would have no effect.
    """
    if context.invoked_subcommand is None:
        return True
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            verb, option = context.invoked_subcommand, f"--{name.replace('_', '-')}"
            raise invalid(
                f"{option} has no effect before {verb}: write {context.command_path} {verb} {option}"
            )
    return False


@contextmanager
def asking(daemon: str, token_file: str, ca_file: str = "") -> Iterator[Client]:
    """Lends a client; its errors get a hint on what to do next.

    Raises
    ------
    UsageError
        ``invalid-argument``: a request made with it is not one that a daemon accepts.
    """
    from pydantic import ValidationError

    from kvxfer.control.client.client_error import ControlError
    from kvxfer.control.client.daemon_address import token_of
    from kvxfer.control.client.rest_client import Client

    with Client(daemon or None, token=token_of(token_file), verify=ca_file or True) as client:
        try:
            yield client
        except ControlError as error:
            if error.code == "unauthorized" and (file := token_file or os.environ.get("KVXFER_TOKEN_FILE")):
                words = f"the token in {file} is not valid at {client.address}: wrong, expired or revoked"
                raise ControlError(error.code, error.title, words, error.status) from None
            if (hint := _HINTS.get(error.code)) is not None:
                words = f"{error.detail}; {hint}"
                raise ControlError(error.code, error.title, words, error.status) from None
            raise
        except ValidationError as error:
            fault: Any = error.errors()[0]
            words = f"{'.'.join(map(str, fault['loc']))} is {fault['input']!r:.100}: {fault['msg']}"
            raise invalid(words) from None


def require_agent(client: Client, agent: str) -> None:
    """Refuses a filter that names no attached agent, where a list is empty.

    Raises
    ------
    UsageError
        ``invalid-argument``.
    """
    if agent and all(agent not in (each.id, each.name) for each in client.agents()):
        raise invalid(f"no agent {agent!r} is attached: kvxfer agents lists them")


def print_json(shown: Any) -> None:
    """Prints one thing as one line of JSON."""
    plain = shown.model_dump(mode="json") if hasattr(shown, "model_dump") else shown
    print(json_of.dumps(plain), flush=True)


def print_rows(
    rows: Iterable[Row],
    columns: Sequence[tuple[str, Callable[[Row], object]]],
    *,
    as_json: bool,
    nothing: str,
    if_empty: Callable[[], None] = lambda: None,
) -> None:
    """Prints a list as a table, or as JSON lines; an empty table is reported on stderr.

    `if_empty` is called first when the list is empty, and may raise the reason.
    """
    if as_json:
        row = None
        for row in rows:
            print_json(row)
        if row is None:
            if_empty()
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, _ in columns:
        # Ids are copied into the next command, so they stay on one line, and other columns shrink.
        table.add_column(name, overflow="fold", justify="left", no_wrap=name in _WHOLE)
    for row in rows:
        table.add_row(*(Text(plain(read(row))) for _, read in columns))
    if table.row_count:
        console().print(table)
    else:
        if_empty()
        print(nothing, file=sys.stderr)


def print_one(shown: Any, as_json: bool) -> None:
    """Prints one thing, one field per line, or as JSON; a field of fields has its lines below it."""
    if as_json:
        print_json(shown)
        return
    told = shown.model_dump(mode="json")
    print("\n".join(_lines(told)))


def _lines(told: dict[str, Any]) -> Iterator[str]:
    width = max(map(len, told))
    for name, value in told.items():
        if isinstance(value, dict) and value:
            yield plain(name)
            yield from (f"  {line}" for line in _lines(value))
            continue
        if name.endswith("_at_s") and isinstance(value, float):
            value = datetime.fromtimestamp(value).astimezone().isoformat(" ", "seconds")
        yield f"{plain(name):{width}}  {plain(value or None if isinstance(value, dict) else value)}"


def console() -> Any:
    """Returns the console on which tables are printed."""
    from rich.console import Console

    found = Console(highlight=False, markup=False, emoji=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_WIDTH)


def plain(value: object) -> str:
    """Returns text without control characters, whatever an agent's name contains."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def counted(number: int, noun: str) -> str:
    """Returns e.g. ``"1 block"`` or ``"2 blocks"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def in_bytes(nbytes: float | None) -> str:
    """Returns a size for people, in powers of 1024."""
    if nbytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def in_time(us: float | None) -> str:
    """Returns a duration for people, of microseconds."""
    if us is None:
        return "-"
    if us < 1e3:
        return f"{us:.0f} us"
    return f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def ago(at_s: float) -> str:
    """Returns how long ago a time of day was."""
    return in_time(max(0.0, time.time() - at_s) * 1e6)
