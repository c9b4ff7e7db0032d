"""Moves KV-cache pages between LLM inference processes, fast and fenced.

Names are loaded when they are first used, so that importing kvxfer costs next to nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer import directory as directory
    from kvxfer import gpu as gpu
    from kvxfer import plan as plan
    from kvxfer.agent import Agent
    from kvxfer.errors import (
        AgentError,
        ExhaustedError,
        KvxferError,
        NoAnswerError,
        PeerError,
        RailError,
        TransferError,
        UsageError,
    )
    from kvxfer.gpu.trigger import Trigger
    from kvxfer.group import Group
    from kvxfer.handle import Handle, Stages, TransferState
    from kvxfer.layout import engine_layouts as engine_layouts
    from kvxfer.layout.kv_layout import KVLayout
    from kvxfer.layout.quantization import Quantization
    from kvxfer.lease import Lease, LeaseState
    from kvxfer.lease_token import LeaseToken
    from kvxfer.memory.block_table import BlockTable
    from kvxfer.memory.huge_pages import use_huge_pages
    from kvxfer.memory.pool import Pool
    from kvxfer.message import Message
    from kvxfer.notification import Notification
    from kvxfer.options import AgentOptions
    from kvxfer.peer import Peer, PeerState
    from kvxfer.peer_limit import PeerLimit
    from kvxfer.region import Region
    from kvxfer.region_descriptor import RegionDescriptor
    from kvxfer.session.stats import AgentStats
    from kvxfer.tls import Tls
    from kvxfer.transfer import Incoming, Transfer

__version__ = "0.2.0"

# Public name -> module.
_HOME = {
    "Agent": "agent",
    "AgentError": "errors",
    "AgentOptions": "options",
    "AgentStats": "session.stats",
    "BlockTable": "memory.block_table",
    "ExhaustedError": "errors",
    "Group": "group",
    "Handle": "handle",
    "Incoming": "transfer",
    "KVLayout": "layout.kv_layout",
    "KvxferError": "errors",
    "Lease": "lease",
    "LeaseState": "lease",
    "LeaseToken": "lease_token",
    "Message": "message",
    "NoAnswerError": "errors",
    "Notification": "notification",
    "Peer": "peer",
    "PeerError": "errors",
    "PeerLimit": "peer_limit",
    "PeerState": "peer",
    "Pool": "memory.pool",
    "Quantization": "layout.quantization",
    "RailError": "errors",
    "Region": "region",
    "RegionDescriptor": "region_descriptor",
    "Stages": "handle",
    "Tls": "tls",
    "Transfer": "transfer",
    "TransferError": "errors",
    "TransferState": "handle",
    "Trigger": "gpu.trigger",
    "UsageError": "errors",
    "use_huge_pages": "memory.huge_pages",
}
# Modules with public names of their own; ``kvxfer.gpu.offer_stores`` needs no import of kvxfer.gpu.
_MODULES = {
    "directory": "directory",
    "engine_layouts": "layout.engine_layouts",
    "gpu": "gpu",
    "plan": "plan",
}

__all__ = [
    "Agent",
    "AgentError",
    "AgentOptions",
    "AgentStats",
    "BlockTable",
    "ExhaustedError",
    "Group",
    "Handle",
    "Incoming",
    "KVLayout",
    "KvxferError",
    "Lease",
    "LeaseState",
    "LeaseToken",
    "Message",
    "NoAnswerError",
    "Notification",
    "Peer",
    "PeerError",
    "PeerLimit",
    "PeerState",
    "Pool",
    "Quantization",
    "RailError",
    "Region",
    "RegionDescriptor",
    "Stages",
    "Tls",
    "Transfer",
    "TransferError",
    "TransferState",
    "Trigger",
    "UsageError",
    "use_huge_pages",
]


def _load(name: str) -> Any:
    module = _MODULES.get(name) or _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
    import importlib

    try:
        found = importlib.import_module(f"kvxfer.{module}")
    except ModuleNotFoundError as error:
        if error.name != "kvxfer._native":
            raise
        raise ModuleNotFoundError(
            f"{__path__[0]} is a source tree in which kvxfer was not built: start Python elsewhere to use "
            "the kvxfer that is installed, or build here (pip install --editable ., or make setup)",
            name=error.name,
        ) from None
    value = found if name in _MODULES else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})


if not TYPE_CHECKING:
    __getattr__ = _load  # for a type checker every name would be there, misspelled ones too
