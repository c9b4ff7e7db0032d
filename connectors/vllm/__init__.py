"""vLLM's KV connector: prefill on one engine, decode on another, the cache between them by kvxfer.

Used by ``--kv-transfer-config '{"kv_connector": "KvxferConnector", "kv_role": "kv_producer"}'``: the
name is registered by the entry point ``vllm.general_plugins``. README.md has settings and what is
supported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.connectors.vllm.connector import KvxferConnector

__all__ = ["KvxferConnector", "register"]

_NAME = "KvxferConnector"


def register() -> None:
    """Makes the connector known to vLLM by its name. vLLM calls it in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(_NAME, __name__, _NAME)
    except ValueError:
        pass  # a plug-in may be loaded twice in one process


def __getattr__(name: str) -> Any:
    # The engine loads its plug-ins in processes that never make a connector.
    if name == _NAME:
        from kvxfer.connectors.vllm.connector import KvxferConnector

        return KvxferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
