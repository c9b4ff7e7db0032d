"""``kvxfer doctor``: what this machine and a peer offer, as a table or as one JSON object."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import kvxfer
from kvxfer.address import Address
from kvxfer.cli.doctor_findings import print_report, problems
from kvxfer.doctor import available_transports, peer_reach
from kvxfer.doctor import report as report_of
from kvxfer.doctor.serve import serve as serve_pages
from kvxfer.errors import invalid
from kvxfer.options import AgentOptions
from kvxfer.shared_secret import FILE_VARIABLE, find_secrets
from kvxfer.tls import Tls

# A finding blocks; 2 is "could not run as asked" (app.py).
_BLOCKED = 1
# A minute is enough to measure a path; for load, use kvxfer bench.
_MAX_MEASURE_S = 60.0
_ANY_PORT = "tcp://127.0.0.1:0"


def doctor(
    require: Annotated[
        str,
        typer.Option(
            metavar="TRANSPORTS",
            help="Transports that must work, e.g. shm,tcp; with --peer one of them must be the path in use.",
        ),
    ] = "",
    pages_dir: Annotated[
        str,
        typer.Option(
            "--pages-dir",
            metavar="DIR",
            help="Also examine this directory, in which a daemon is to keep pages.",
        ),
    ] = "",
    show_problems: Annotated[
        bool, typer.Option("--problems", help="Show only findings that block or limit.")
    ] = False,
    peer: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Connect to this agent, name the path, and measure it if it is kvxfer doctor --serve.",
        ),
    ] = "",
    serve: Annotated[
        bool, typer.Option("--serve", help="Let others measure this machine with --peer, until interrupted.")
    ] = False,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="With --serve: address to listen on; beyond loopback it needs a secret. Default: any port "
            "of 127.0.0.1.",
        ),
    ] = "",
    transports: Annotated[
        str,
        typer.Option(
            metavar="TRANSPORTS",
            help="With --peer or --serve: transports that this end may use, e.g. unix,tcp.",
        ),
    ] = "",
    timeout_s: Annotated[
        float,
        typer.Option("--timeout-s", metavar="SECONDS", help="With --peer: how long connecting may take."),
    ] = 5.0,
    measure_s: Annotated[
        float, typer.Option("--measure-s", metavar="SECONDS", help="With --peer: how long to read pages.")
    ] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on one line.")] = False,
) -> None:
    """Say what this machine offers to kvxfer, and what to change first; status 1 when something blocks.

    --peer and --serve read the secret from the file KVXFER_SECRET_FILE, or from KVXFER_SECRET.

    kvxfer doctor --problems

    kvxfer doctor --require shm,tcp --json

    kvxfer doctor --pages-dir /var/lib/kvxfer/pages

    kvxfer doctor --serve --listen 0.0.0.0:7301

    kvxfer doctor --peer 10.0.0.7:7301
    """
    required, willing = _names(require), _names(transports)
    available_transports.check_names(required, "--require")
    available_transports.check_names(willing, "--transports")
    if serve:
        others = {"--peer": peer, "--require": require, "--pages-dir": pages_dir, "--problems": show_problems}
        _check_alone("--serve", others)
        options = replace(_options(willing), listen=_listening(listen) if listen else _ANY_PORT)
        _serve(options, as_json=json)
        return
    if listen:
        raise invalid("--listen is for --serve: add --serve, or leave --listen out")
    if transports and not peer:
        raise invalid("--transports is for --peer and --serve: add one, or leave --transports out")
    address = peer_reach.complete_address(peer, "--peer") if peer else ""
    if not 0 < measure_s <= _MAX_MEASURE_S:
        raise invalid(f"--measure-s must be above 0 and at most {_MAX_MEASURE_S:g}, not {measure_s:g}")
    if not 0 < timeout_s < math.inf:
        raise invalid(f"--timeout-s must be a positive number of seconds, not {timeout_s:g}")
    if peer:
        # Wrong options are refused before anything is examined.
        replace(_options(willing), connect_timeout_s=timeout_s).to_native()
    report = report_of.examine(required, pages_folder=Path(pages_dir).absolute() if pages_dir else None)
    if peer:
        findings, report.peer = peer_reach.examine(
            address, _options(willing).transports, required, timeout_s, measure_s
        )
        report.findings += findings
    if not json:
        print_report(report, problems_alone=show_problems)
    else:
        ok = {"ok": report.ok}
        if show_problems:
            report.findings = problems(report.findings)
        _print_json(report.to_dict() | ok)
    if not report.ok:
        raise typer.Exit(_BLOCKED)


def _listening(listen: str) -> str:
    """Returns the address; refuses one that other hosts reach if there is no secret."""
    address = peer_reach.complete_address(listen, "--listen")
    is_open = not find_secrets(None).accepted and Tls.of_environment() is None
    if is_open and not Address.parse(address, "--listen").is_loopback:
        raise invalid(
            f"--listen {listen} without a secret would let every host that reaches it connect: name a "
            f"file with a secret in {FILE_VARIABLE} (openssl rand -hex 32 > secret) at both ends, or "
            "listen on 127.0.0.1:0"
        )
    return address


def _options(transports: tuple[str, ...]) -> AgentOptions:
    return AgentOptions(transports=transports) if transports else AgentOptions()


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _check_alone(what: str, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if value:
            raise invalid(f"{name} cannot be combined with {what}: leave one out")


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
