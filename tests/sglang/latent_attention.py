"""A plug-in for tests: DeepSeek's attention over latents on a CPU; SGLang has kernels for it only on GPUs.

SGLang's attention in torch reads keys and values from the cache unchanged, so it works if the model's queries
are in the latents' space ("absorbed"). By default the model does this only for decode's tokens.
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
