"""A rank in its own process, which a test may stop and kill.

    python -m tests.sglang.rank_process ROLE BOOTSTRAP FOLDER

prints its process id. Then it calls, for each line of its input, a method of one of its requests, and prints
the result.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests import fork_server
from tests.sglang import forked

ROOT: Final = Path(__file__).parents[2]


class RankProcess:
    """An engine of one rank elsewhere, and its requests by their rooms."""

    def __init__(self, role: str, address: str, folder: Path) -> None:
        socket = fork_server.start(forked.__name__)
        command = [sys.executable, "-m", fork_server.__name__, str(socket), "-m", __name__]
        self._process = subprocess.Popen(
            [*command, role, address, str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = int(self._answer())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.send_signal(signal.SIGKILL)
        # Do not wait for the end of its output: the process that it was forked from has the same output.
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        self._process.wait()

    def request(self, room: int, seed: int, num_pages: int) -> None:
        """Makes its half of a request."""
        self.call(room, "make", seed, num_pages)

    def call(self, room: int, method: str, *arguments: Any) -> Any:
        """Calls a method of a request, or reads one of its attributes."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([room, method, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def send_signal(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # it was killed before

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the rank has died"
        return line


def main(role: str, address: str, folder: str) -> None:
    from tests.sglang.ranks import LLAMA, Cache, Engine, Half, Receiving, Sending, configured

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # SGLang's output is not an answer
    with configured(Path(folder), address=address):
        engine = Engine(role, LLAMA, 1, address)
        print(os.getpid(), file=answers)
        halves: dict[int, Half] = {}
        for line in sys.stdin:
            room, method, arguments = json.loads(line)
            if method == "make":
                seed, num_pages = arguments
                half = Sending if role == "prefill" else Receiving
                halves[room] = half(engine, room, Cache(LLAMA, num_pages, seed), random.Random(seed))
                print("null", file=answers)
                continue
            found = getattr(halves[room], method)
            print(json.dumps(found(*arguments) if callable(found) else found), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
