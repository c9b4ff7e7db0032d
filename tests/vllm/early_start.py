"""Engines that start while tests still use others: most of what a start takes is spent by one processor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from kvxfer.bench.engines.server_process import ServerProcess

Group = TypeVar("Group")
#: Starts processes in a folder, without waiting for them, and ends them: one, some, or a dataclass of some.
Start = Callable[[Path], AbstractContextManager[Group]]

_STARTS: dict[str, Start[Any]] = {}


def started(
    name: str, start: Start[Group], scope: Literal["module", "session"] = "module"
) -> Callable[..., Iterator[Group]]:
    """Returns a fixture of this name: what ``start`` began, maybe long ago, once all of it serves."""
    if _STARTS.setdefault(name, start) is not start:
        raise ValueError(f"two fixtures are called {name!r}, and what starts early goes by its name")

    @pytest.fixture(scope=scope, name=name)
    def fixture(early_start: EarlyStart) -> Iterator[Group]:
        with early_start.taken(name) as group:
            yield group

    return fixture


class EarlyStart:
    """What a run's tests will ask for, in that order; as soon as they have one, the next begins to start."""

    def __init__(self, tests: Sequence[pytest.Item], folders: pytest.TempPathFactory) -> None:
        names = (name for test in tests for name in getattr(test, "fixturenames", ()))
        self._to_come = deque(dict.fromkeys(name for name in names if name in _STARTS))
        self._folders = folders
        self._begun: dict[str, tuple[ExitStack, Any]] = {}

    def begin_next(self) -> None:
        """Begins what is asked for next; what cannot be begun says so to those who ask for it."""
        if self._to_come:
            with suppress(Exception):
                self._begin(self._to_come[0])
            self._to_come.popleft()

    @contextmanager
    def taken(self, name: str) -> Iterator[Any]:
        """What has begun under this name, or begins now, until the block's end."""
        if name not in self._begun:
            if name in self._to_come:
                self._to_come.remove(name)
            self._begin(name)
        stack, group = self._begun.pop(name)
        with stack:
            for process in _processes(group):
                process.wait_ready()
            self.begin_next()
            yield group

    def close(self) -> None:
        """Ends what has begun and was never taken."""
        with ExitStack() as everything:
            for stack, _ in self._begun.values():
                everything.push(stack)
            self._begun.clear()

    def _begin(self, name: str) -> None:
        with ExitStack() as stack:
            group = stack.enter_context(_STARTS[name](self._folders.mktemp(name)))
            self._begun[name] = stack.pop_all(), group


def _processes(group: object) -> Iterator[ServerProcess]:
    if isinstance(group, ServerProcess):
        yield group
    elif isinstance(group, tuple):
        for each in group:
            yield from _processes(each)
    elif is_dataclass(group):
        for field in fields(group):
            yield from _processes(getattr(group, field.name))
