"""A plug-in that SGLang needs without a GPU, for the engines that tests and benchmarks start."""

from __future__ import annotations

import time
from typing import Any, Final

#: The plug-in's name for engines (`kvxfer.bench.engines.sglang_server`), and where it is.
NAME: Final = "kvxfer-cpu"
ENTRY_POINT: Final = f"{__name__}:register"

_UNPINNED: Final = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
_RANGES: Final = "_sglang_cuda_host_registered_ranges"
# An idle scheduler polls for requests without pause. On two cores it takes time from busy ones.
_REST_S: Final = 0.001


def register() -> None:
    """Makes SGLang use host memory as it is, and sleep while it has no request."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_UNPINNED, _leave_unpinned, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.on_idle", _rest, HookType.AFTER)


def _leave_unpinned(buffer: Any, registration_granularity_bytes: int | None = None) -> None:
    setattr(buffer, _RANGES, [])


def _rest(_: None, scheduler: Any) -> None:
    if scheduler.is_fully_idle():
        time.sleep(_REST_S)
