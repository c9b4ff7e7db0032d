"""TensorRT-LLM's KV cache connector: prefill on one engine, decode on another, the cache between by kvxfer.

Used by ``KvCacheConnectorConfig(connector_module="kvxfer.connectors.trtllm",
connector_scheduler_class="KvxferConnectorScheduler", connector_worker_class="KvxferConnectorWorker")``.
README.md has the settings, how a request goes, and what it was held to: it has not run against the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.connectors.trtllm.leader import KvxferConnectorScheduler
    from kvxfer.connectors.trtllm.rank_worker import KvxferConnectorWorker

__all__ = ["KvxferConnectorScheduler", "KvxferConnectorWorker"]


def __getattr__(name: str) -> Any:
    # Without the engine its base classes are not there: whoever reads the settings alone needs none.
    if name == "KvxferConnectorScheduler":
        from kvxfer.connectors.trtllm.leader import KvxferConnectorScheduler

        return KvxferConnectorScheduler
    if name == "KvxferConnectorWorker":
        from kvxfer.connectors.trtllm.rank_worker import KvxferConnectorWorker

        return KvxferConnectorWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
