"""vLLM's KV connector: one engine runs prefill, another runs decode, and kvxfer moves the cache.

Enable it with ``--kv-transfer-config '{"kv_connector": "KvxferConnector", "kv_role": "kv_producer"}'``. The
entry point ``vllm.general_plugins`` registers the name. README.md lists the settings and what is supported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.connectors.vllm.connector import KvxferConnector

__all__ = ["KvxferConnector", "register"]

_NAME = "KvxferConnector"


def register() -> None:
    """Registers the connector's name with vLLM. vLLM calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(_NAME, __name__, _NAME)
    except ValueError:
        pass  # vLLM may load a plug-in twice in one process


def __getattr__(name: str) -> Any:
    # Imported on demand: the engine loads plug-ins in processes that never make a connector.
    if name == _NAME:
        from kvxfer.connectors.vllm.connector import KvxferConnector

        return KvxferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
