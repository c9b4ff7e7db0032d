"""What SGLang needs where there is no GPU: a plug-in of the engines that tests and benchmarks start."""

from __future__ import annotations

import time
from typing import Any, Final

#: The name under which an engine is told of it (`kvxfer.bench.engines.sglang_server`), and where it is.
NAME: Final = "kvxfer-cpu"
ENTRY_POINT: Final = f"{__name__}:register"

_UNPINNED: Final = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
_RANGES: Final = "_sglang_cuda_host_registered_ranges"
# Schedulers without a request ask for one without pause: on two cores they take the time of those that work.
_REST_S: Final = 0.001


def register() -> None:
    """Has SGLang take host memory as it is, and rest while nobody asks anything of it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_UNPINNED, _leave_unpinned, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.on_idle", _rest, HookType.AFTER)


def _leave_unpinned(buffer: Any, registration_granularity_bytes: int | None = None) -> None:
    setattr(buffer, _RANGES, [])


def _rest(_: None, scheduler: Any) -> None:
    if scheduler.is_fully_idle():
        time.sleep(_REST_S)
