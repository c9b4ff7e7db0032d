"""What the process from which tests' daemons are forked imports."""

from __future__ import annotations

from typing import Final

from tests import forked
from tests.forked import environment as environment
from tests.forked import main as main

MODULES: Final = (
    "kvxfer.cli.serve",
    "kvxfer.control.serve",
    "tests.control.daemon_process",
    "typer.main",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
)


def prepare() -> None:
    forked.prepare(*MODULES)
