"""A plug-in of tests: DeepSeek's attention over latents on a CPU, which SGLang has kernels for on GPUs alone.

Its attention in torch reads keys and values from the cache as they are, so it can do that where the model
asks in the latents' space ("absorbed"). By itself the model does so for decode's tokens alone.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

NAME: Final = "kvxfer-latent-attention"
ENTRY_POINT: Final = f"{__name__}:register"
_COMMON: Final = "sglang.srt.models.deepseek_common"


def register() -> None:
    handlers = importlib.import_module(f"{_COMMON}.attention_backend_handler")
    methods = importlib.import_module(f"{_COMMON}.attention_forward_methods.forward_methods")

    def absorbed(attention: Any, forward_batch: Any) -> Any:
        return methods.AttnForwardMethod.MLA

    handlers.AttentionBackendRegistry.register("torch_native", absorbed)
