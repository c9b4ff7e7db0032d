"""An engine in its own process that runs a test's commands, line by line."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests import fork_server

ROOT: Final = Path(__file__).parents[2]
_STOP_TIMEOUT_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.2


class EngineProcess:
    """``python -m MODULE ARGUMENT...``, whose ``main`` ends in `serve`.

    Parameters
    ----------
    log
        Takes what the engine prints.
    forked
        The module of `tests.fork_server` that imports the engine beforehand; "" for a process that imports
        it itself.
    """

    def __init__(self, module: str, *arguments: str, log: Path, forked: str = "") -> None:
        self._log = log
        of_fork = ["-m", fork_server.__name__, str(fork_server.start(forked))] if forked else []
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", *of_fork, "-m", module, *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()  # the engine ends with its input
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, *arguments: Any) -> Any:
        """Waits until the engine has started, calls one of its methods and returns the result."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([method, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its log says why it has ended
        # Do not wait for the end of its output: the process that it was forked from has the same output.
        while not select.select([self._process.stdout], [], [], _LOOK_EVERY_S)[0]:
            assert self._process.poll() is None, self._last_words()
        line = self._process.stdout.readline()
        assert line, self._last_words()
        return json.loads(line)

    def _last_words(self) -> str:
        return f"the engine has ended; the end of its log:\n{self._log.read_text(errors='replace')[-4000:]}"


def serve(make: Callable[[], Any]) -> None:
    """Makes an engine, and calls its methods for `EngineProcess.call`, until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # an engine's output is not an answer
    engine = make()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(engine, method)(*arguments)), file=answers)
