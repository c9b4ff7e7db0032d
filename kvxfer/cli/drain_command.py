"""``kvxfer drain``: makes a node refuse new work, waits until it is ready to stop, or ends the drain."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from kvxfer.cli.asking import (
    FAILED,
    CaFileOption,
    DaemonOption,
    JsonOption,
    TokenFileOption,
    asking,
    counted,
    plain,
    print_json,
)
from kvxfer.errors import invalid

_LOOK_S = 0.5


def drain(
    deadline_s: Annotated[
        float, typer.Option(min=0.1, help="How long running transfers may continue.")
    ] = 300.0,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the node is ready to stop.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="End the drain: accept work again.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Show the drain's progress, and change nothing.")
    ] = False,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Make a node refuse new work and finish what runs; status 1 with --wait if it is not ready in time.

    kvxfer drain --wait --deadline-s 60

    kvxfer drain --undo
    """
    if undo and (wait or show):
        raise invalid("--undo cannot be combined with --wait or --show")
    with asking(daemon, token_file, ca_file) as client:
        if undo:
            found = client.end_drain()
        elif show:
            found = client.get_drain()
        else:
            found = client.begin_drain(deadline_s)
        until_s = time.monotonic() + deadline_s
        while wait and not found.ready and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            found = client.get_drain()
    if json:
        print_json(found)
    else:
        words = "ready to stop" if found.ready else f"drains: {counted(found.running, 'transfer')} left"
        print(words if found.draining else "accepts work")
        for each in found.agents:
            if each.refused:
                print(f"  {plain(each.name)} was not drained: {plain(each.refused)}", file=sys.stderr)
    if wait and not found.ready:
        raise typer.Exit(FAILED)
