"""What the process from which tests' benchmarks are forked imports."""

from __future__ import annotations

from typing import Final

from tests import forked
from tests.forked import environment as environment
from tests.forked import main as main

_MEASURED: Final = ("daemon", "handover", "latency", "pages", "parking", "plan", "scale", "setup", "store")
MODULES: Final = (
    "kvxfer.cli.app",
    "kvxfer.cli.bench",
    *(f"kvxfer.bench.{name}.measure" for name in _MEASURED),
)


def prepare() -> None:
    forked.prepare(*MODULES)
