"""A daemon with a command line from deploy/."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.control.serving import BOUND_S, says_ready


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[None]:
    """Runs ``kvxfer ARGUMENTS``, waits until it is ready, and stops it as service managers do."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvxfer", *arguments], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line.strip())
                if says_ready(said[-1]):
                    break
            assert said, arguments
            assert says_ready(said[-1]), said
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield
            process.terminate()
            assert process.wait(BOUND_S) == 0
        finally:
            process.kill()
