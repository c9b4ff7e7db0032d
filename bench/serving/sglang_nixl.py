"""A plug-in for SGLang's NIXL backend where caches are host memory, of which SGLang tells it nothing."""

from __future__ import annotations

from typing import Any, Final

NAME: Final = "kvxfer-nixl-on-host"
ENTRY_POINT: Final = f"{__name__}:register"

_MADE: Final = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"


def register() -> None:
    """Has the backend register caches as host memory; by itself it takes all for a GPU's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_MADE, _on_host, HookType.BEFORE)


def _on_host(_: Any, kv_args: Any, *others: Any, **named: Any) -> None:
    kv_args.kv_data_mem_kinds = ["DRAM"] * len(kv_args.kv_data_ptrs)
