"""The router (`kvxfer.bench.engines.router`) in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvxfer.bench.engines.server_process import ServerProcess


class RouterServer(ServerProcess):
    """One router.

    Parameters
    ----------
    prefills, decodes
        Addresses of the engines.
    log
        The file that takes what it prints.
    dispatch
        As of ``--dispatch``.
    """

    def __init__(
        self, prefills: Sequence[str], decodes: Sequence[str], log: Path, dispatch: str = "sequential"
    ) -> None:
        engines = ["--prefill", ",".join(prefills), "--decode", ",".join(decodes)]
        command = [sys.executable, "-m", "kvxfer.bench", "router", *engines, "--dispatch", dispatch]
        super().__init__("the router", command, log)
