"""What the process from which vLLM's engines are forked imports, and what a fork runs."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from typing import Final

#: What every engine imports, except its model.
MODULES: Final = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)


def environment() -> dict[str, str]:
    """Returns the environment variables for the import."""
    from kvxfer.bench.engines import vllm_server

    return vllm_server.ENVIRONMENT


def prepare() -> None:
    for module in MODULES:
        importlib.import_module(module)
    # On CPUs vLLM always spawns, regardless of its settings.
    forks = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forks  # type: ignore[assignment]


def main(arguments: list[str]) -> None:
    """Runs ``vllm`` with these arguments."""
    sys.argv = ["vllm", *arguments]
    sys.modules["vllm.entrypoints.cli.main"].main()
