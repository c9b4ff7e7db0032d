"""``kvxfer doctor``: what this machine and a peer offer, as a table or as one JSON object."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import kvxfer
from kvxfer.doctor import available_transports, peer_reach
from kvxfer.doctor import report as report_of
from kvxfer.doctor.finding import Finding, State
from kvxfer.doctor.serve import serve as serve_pages
from kvxfer.errors import invalid
from kvxfer.options import AgentOptions

# Something blocks what was asked for; 2 is "could not run as asked" (app.py).
_BLOCKED = 1
# Of tables in files and pipes, where nobody says how wide a line may be.
_WIDTH = 120
_STYLES = {State.GOOD: "green", State.NOTE: "dim", State.LIMITS: "yellow", State.BLOCKS: "bold red"}
# A minute tells what a path can do; for load, use kvxfer bench.
_MAX_MEASURE_S = 60.0
_ANY_PORT = "tcp://127.0.0.1:0"


def doctor(
    require: Annotated[
        str, typer.Option(help="Transports that must work, e.g. shm,tcp; with --peer also: the path in use.")
    ] = "",
    peer: Annotated[
        str, typer.Option(help="Connect to this agent, name the path, and measure it if it is a doctor.")
    ] = "",
    serve: Annotated[
        bool, typer.Option("--serve", help="Let others measure this machine with --peer, until interrupted.")
    ] = False,
    listen: Annotated[str, typer.Option(help="With --serve: where; beyond loopback it needs a secret.")] = "",
    transports: Annotated[str, typer.Option(help="With --peer or --serve: what this end may use.")] = "",
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="With --peer: of connecting.")] = 5.0,
    measure_s: Annotated[
        float, typer.Option("--measure-s", help="With --peer: how long to read pages.")
    ] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")] = False,
) -> None:
    """Say what this machine offers to kvxfer, and what to change; status 1 when something blocks.

    The secret of --peer and --serve is in the file KVXFER_SECRET_FILE, or is KVXFER_SECRET.
    """
    required, willing = _names(require), _names(transports)
    if serve:
        _check_alone("--serve", {"--peer": peer, "--require": require})
        options = replace(_options(willing), listen=listen or _ANY_PORT)
        _serve(options, as_json=json)
        return
    _check_alone("a run without --serve", {"--listen": listen})
    if not peer:
        _check_alone("a run without --peer or --serve", {"--transports": transports})
    address = peer_reach.complete_address(peer) if peer else ""
    available_transports.check_names(required)
    if not 0 < measure_s <= _MAX_MEASURE_S:
        raise invalid(f"--measure-s is above 0 and at most {_MAX_MEASURE_S:g}, not {measure_s:g}")
    if peer:
        # Mistakes in what was asked for end it before anything is examined.
        replace(_options(willing), connect_timeout_s=timeout_s).to_native()
    report = report_of.examine(required)
    if peer:
        findings, report.peer = peer_reach.examine(
            address, _options(willing).transports, required, timeout_s, measure_s
        )
        report.findings += findings
    if json:
        _print_json(report.to_dict())
    else:
        _print_table(report)
    if not report.ok:
        raise typer.Exit(_BLOCKED)


def _options(transports: tuple[str, ...]) -> AgentOptions:
    return AgentOptions(transports=transports) if transports else AgentOptions()


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _check_alone(what: str, others: dict[str, str]) -> None:
    for name, value in others.items():
        if value:
            raise invalid(f"{name} does not go with {what}: leave one out")


def _serve(options: kvxfer.AgentOptions, *, as_json: bool) -> None:
    stop = threading.Event()

    def announce(address: str) -> None:
        if as_json:
            _print_json({"address": address})
            return
        print(f"serving pages at {address}", flush=True)
        print(f"measure with: kvxfer doctor --peer {address}; end with Ctrl-C", file=sys.stderr, flush=True)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        serve_pages(options, stop, announce, lambda words: print(words, file=sys.stderr, flush=True))
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _print_json(shown: dict[str, object]) -> None:
    print(json.dumps(shown), flush=True)


def _print_table(report: report_of.Report) -> None:
    """Prints findings by subject; what is good in one line, the rest with its reason and its remedy."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    for subject, findings in itertools.groupby(report.findings, key=lambda finding: finding.subject):
        console.print(Text(subject, "bold"))
        table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(min_width=20, max_width=28)
        table.add_column(min_width=6)
        table.add_column(overflow="fold")
        for finding in findings:
            table.add_row(finding.name, Text(finding.state, _STYLES[finding.state]), _words(finding))
        console.print(Padding(table, (0, 0, 1, 2)))
    limits, blocks = (
        sum(finding.state is state for finding in report.findings) for state in (State.LIMITS, State.BLOCKS)
    )
    verdict = f"{blocks or 'nothing'} block{'' if blocks > 1 else 's'}, {limits or 'nothing'} limit"
    verdict += "" if limits > 1 else "s"
    console.print(Text(verdict, "bold red" if blocks else "bold"))


def _words(finding: Finding) -> Text:
    words = Text(finding.found)
    if finding.state is not State.GOOD:
        words.append(f"\n{finding.why}", "dim")
    if finding.change:
        words.append(f"\n-> {finding.change}", _STYLES[finding.state])
    return words
