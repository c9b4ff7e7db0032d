"""A plug-in for SGLang's own backends where caches are host memory, of which SGLang tells them nothing."""

from __future__ import annotations

import importlib
from typing import Any, Final

NAME: Final = "kvxfer-host-memory"
ENTRY_POINT: Final = f"{__name__}:register"

_NIXL: Final = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"
_MOONCAKE: Final = "sglang.srt.disaggregation.mooncake.conn"


def register() -> None:
    """Has NIXL register caches as host memory, and Mooncake take page numbers that are there already."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_NIXL, _on_host, HookType.BEFORE)
    # Else they are on their way from a GPU, to pinned memory.
    importlib.import_module(_MOONCAKE).MooncakeKVSender.supports_host_tensor_indices = False


def _on_host(_: Any, kv_args: Any, *others: Any, **named: Any) -> None:
    # By itself it takes all for a GPU's.
    kv_args.kv_data_mem_kinds = ["DRAM"] * len(kv_args.kv_data_ptrs)
