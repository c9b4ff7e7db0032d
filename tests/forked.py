"""What the process from which tests' programs are forked imports, and how a fork runs one."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

MODULES: Final = ("asyncio", "pytest", "kvxfer", "tests.fault.node")


def environment() -> dict[str, str]:
    """Returns the environment variables for the import. Only a process of one thread may be forked."""
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def prepare(*more: str) -> None:
    for module in (*MODULES, *more):
        importlib.import_module(module)
    assert len(list(Path("/proc/self/task").iterdir())) == 1


def main(arguments: list[str]) -> None:
    """Runs a program with its arguments, as ``python -c`` does."""
    gc.unfreeze()  # the end of the interpreter looks at everything
    program, *own = arguments
    sys.argv = ["-c", *own]
    sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
