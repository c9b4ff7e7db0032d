"""The router (`kvxfer.bench.engines.router`) in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvxfer.bench.engines.server_process import ServerProcess


class RouterServer(ServerProcess):
    """One router between engines of these addresses; ``dispatch`` is as of ``--dispatch``."""

    def __init__(
        self, prefills: Sequence[str], decodes: Sequence[str], log: Path, dispatch: str = "sequential"
    ) -> None:
        engines = ["--prefill", ",".join(prefills), "--decode", ",".join(decodes)]
        command = [sys.executable, "-m", "kvxfer.bench", "router", *engines, "--dispatch", dispatch]
        super().__init__("the router", command, log)
