"""A plug-in that tells SGLang's own backends that caches are host memory; SGLang does not tell them."""

from __future__ import annotations

import importlib
from typing import Any, Final

NAME: Final = "kvxfer-host-memory"
ENTRY_POINT: Final = f"{__name__}:register"

_NIXL: Final = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"
_MOONCAKE: Final = "sglang.srt.disaggregation.mooncake.conn"


def register() -> None:
    """Makes NIXL register caches as host memory, and Mooncake use page numbers that are in host memory."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_NIXL, _on_host, HookType.BEFORE)
    # Otherwise they are still being copied from a GPU to pinned memory.
    importlib.import_module(_MOONCAKE).MooncakeKVSender.supports_host_tensor_indices = False


def _on_host(_: Any, kv_args: Any, *others: Any, **named: Any) -> None:
    # By default it takes all memory for a GPU's.
    kv_args.kv_data_mem_kinds = ["DRAM"] * len(kv_args.kv_data_ptrs)
