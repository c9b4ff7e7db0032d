"""The engine's interface, where this release of it has it."""

from __future__ import annotations

import importlib
from typing import Any, Final

#: Where releases have it, the newest first.
MODULES: Final = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


def _found() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Of what the engine itself lacks it tells better than we.
            if not name.startswith(str(error.name)):
                raise
    raise ModuleNotFoundError(
        f"TensorRT-LLM's KV cache connector is in none of {', '.join(MODULES)}: install tensorrt_llm 1.1 or "
        "later into this environment",
        name="tensorrt_llm",
    )


module: Final[Any] = _found()
