"""Fixtures for engines and daemons; they end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

pytest.importorskip("fastapi", reason="kvxfer[control] is not installed")

from tests.control.engines import Daemon, Engine, MakeDaemon, MakeEngine
from tests.control.serving import Served, serving


@pytest.fixture
async def engine() -> AsyncIterator[Callable[..., Engine]]:
    """Makes engines in this process."""
    made: list[Engine] = []

    def make(*arguments: Any, **options: Any) -> Engine:
        made.append(Engine(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        await each.agent.aclose()


@pytest.fixture
async def daemon() -> AsyncIterator[Callable[..., Daemon]]:
    """Makes daemons' agents with pools in this process."""
    made: list[Daemon] = []

    def make(*arguments: Any, **options: Any) -> Daemon:
        made.append(Daemon(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        await each.aclose()


@pytest.fixture
async def source(engine: MakeEngine) -> Engine:
    """An engine whose pages are parked."""
    return engine("prefill")


@pytest.fixture
async def node(source: Engine, daemon: MakeDaemon) -> Daemon:
    """A daemon's agent with a pool; it ends before the source does."""
    return daemon()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A daemon without agents that serves on the test's own loop."""
    async with serving(tmp_path) as found:
        yield found
