"""What the process from which SGLang's engines are forked imports, and what a fork runs."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
import traceback
import warnings
from typing import Final

#: What every engine imports; the registry imports all models.
MODULES: Final = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.disaggregation.nixl",
    "torch.multiprocessing",
    "sglang_router.mini_lb",
    "sglang_router.router",
    "kvxfer.connectors.sglang",
)


def environment() -> dict[str, str]:
    """Returns the environment variables for the import."""
    from kvxfer.bench.engines import sglang_server

    return dict(sglang_server.ENVIRONMENT)


def prepare() -> None:
    warnings.simplefilter("ignore")
    for module in MODULES:
        importlib.import_module(module)
    # SGLang spawns, and says so when an engine starts.
    multiprocessing.set_start_method("fork", force=True)
    for module in ("multiprocessing", "torch.multiprocessing"):
        sys.modules[module].set_start_method = lambda *_, **__: None  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    """Runs a module of SGLang with its arguments, as ``python -m`` does."""
    module, *own = arguments[arguments.index("-m") + 1 :]
    sys.argv = [module, *own]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit:
        pass  # it has printed the reason
    except BaseException:
        traceback.print_exc()
    # Without the end of modules that would report everything they hold as a leak.
    sys.stdout.flush()
    os._exit(0)
