"""TensorRT-LLM's KV cache connector: one engine runs prefill, another runs decode, kvxfer moves the cache.

Enable it with ``KvCacheConnectorConfig(connector_module="kvxfer.connectors.trtllm",
connector_scheduler_class="KvxferConnectorScheduler", connector_worker_class="KvxferConnectorWorker")``.
README.md describes the settings and the way of a request. The connector was tested against a record of the
interface; it has not run against the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.connectors.trtllm.leader import KvxferConnectorScheduler
    from kvxfer.connectors.trtllm.rank_worker import KvxferConnectorWorker

__all__ = ["KvxferConnectorScheduler", "KvxferConnectorWorker"]


def __getattr__(name: str) -> Any:
    # Imported on demand: without the engine its base classes do not exist, and the settings need none.
    if name == "KvxferConnectorScheduler":
        from kvxfer.connectors.trtllm.leader import KvxferConnectorScheduler

        return KvxferConnectorScheduler
    if name == "KvxferConnectorWorker":
        from kvxfer.connectors.trtllm.rank_worker import KvxferConnectorWorker

        return KvxferConnectorWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
