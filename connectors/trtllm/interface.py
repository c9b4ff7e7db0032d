"""Imports the engine's connector interface from the module where the installed release has it."""

from __future__ import annotations

import importlib
from typing import Any, Final

#: The modules that have the interface, the newest release's first.
MODULES: Final = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


def _found() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # If the engine lacks one of its own modules, its error explains that best.
            if not name.startswith(str(error.name)):
                raise
    raise ModuleNotFoundError(
        f"TensorRT-LLM's KV cache connector was not found in {', '.join(MODULES)}: install tensorrt_llm 1.1 "
        "or later into this environment",
        name="tensorrt_llm",
    )


module: Final[Any] = _found()
