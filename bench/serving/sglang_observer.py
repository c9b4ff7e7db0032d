"""A plug-in that notes when SGLang's engines have computed a prompt, and when decode has its cache.

The figure describes SGLang, not one backend. It begins at the end of prefill's last chunk, before its cache
goes to the backend. It ends when decode's scheduler finds the transfer at ``Success``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from kvxfer.bench.serving.observer import Log

NAME: Final = "kvxfer-serving-observer"
ENTRY_POINT: Final = f"{__name__}:register"

_PACKAGE: Final = "sglang.srt.disaggregation"
_PREFILL: Final = f"{_PACKAGE}.prefill.SchedulerDisaggregationPrefillMixin"
_COMPUTED: Final = f"{_PREFILL}.process_batch_result_disagg_prefill"
_FOUND: Final = f"{_PACKAGE}.decode.DecodeTransferQueue._commit_transfer_to_req"


def register() -> None:
    """Wraps the two places. SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_COMPUTED, _computed, HookType.AROUND)
    HookRegistry.register(_FOUND, _found, HookType.AROUND)


@functools.cache
def _log() -> Log:
    return Log("scheduler")  # created by a process once it has something to record


def _computed(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    at_ns = time.monotonic_ns()
    ended = [request.rid for request in batch.reqs if request.inflight_middle_chunks <= 0]
    original(scheduler, batch, result)
    for name in ended:
        _log().event("computed", name, at_ns)
    _log().write()


def _found(original: Callable[..., Any], queue: Any, decode_request: Any) -> Any:
    at_ns = time.monotonic_ns()
    original(queue, decode_request)
    _log().event("found", decode_request.req.rid, at_ns)
    _log().write()
