"""Moves KV-cache pages between LLM inference processes, fast and fenced.

Names are loaded when they are first used, so that importing kvxfer costs next to nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer import engine_layouts as engine_layouts
    from kvxfer import gpu as gpu
    from kvxfer import plan as plan
    from kvxfer.agent import Agent
    from kvxfer.block_table import BlockTable
    from kvxfer.command_ring import CommandRing
    from kvxfer.copy_program import CopyProgram
    from kvxfer.directory import Directory
    from kvxfer.directory.memory import MemoryDirectory
    from kvxfer.errors import (
        AgentError,
        ExhaustedError,
        KvxferError,
        PeerError,
        RailError,
        TransferError,
        UsageError,
    )
    from kvxfer.huge_pages import use_huge_pages
    from kvxfer.layout import KVLayout
    from kvxfer.lease import Lease
    from kvxfer.notification import Notification
    from kvxfer.options import AgentOptions
    from kvxfer.peer import Peer
    from kvxfer.pool import Pool
    from kvxfer.quantization import Quantization
    from kvxfer.region import Region, RegionDescriptor
    from kvxfer.routing import Share, route
    from kvxfer.transfer import Incoming, Transfer
    from kvxfer.trigger import Trigger

__version__ = "0.1.0"

# Public name -> module.
_HOME = {
    "Agent": "agent",
    "AgentError": "errors",
    "AgentOptions": "options",
    "BlockTable": "block_table",
    "CommandRing": "command_ring",
    "CopyProgram": "copy_program",
    "Directory": "directory",
    "ExhaustedError": "errors",
    "Incoming": "transfer",
    "KVLayout": "layout",
    "KvxferError": "errors",
    "Lease": "lease",
    "MemoryDirectory": "directory.memory",
    "Notification": "notification",
    "Peer": "peer",
    "PeerError": "errors",
    "Pool": "pool",
    "Quantization": "quantization",
    "RailError": "errors",
    "Region": "region",
    "RegionDescriptor": "region",
    "Share": "routing",
    "Transfer": "transfer",
    "TransferError": "errors",
    "Trigger": "trigger",
    "UsageError": "errors",
    "route": "routing",
    "use_huge_pages": "huge_pages",
}
# Modules with names of their own; ``kvxfer.gpu.offer_stores`` needs no import of kvxfer.gpu.
_MODULES = ("engine_layouts", "gpu", "plan")

__all__ = [
    "Agent",
    "AgentError",
    "AgentOptions",
    "BlockTable",
    "CommandRing",
    "CopyProgram",
    "Directory",
    "ExhaustedError",
    "Incoming",
    "KVLayout",
    "KvxferError",
    "Lease",
    "MemoryDirectory",
    "Notification",
    "Peer",
    "PeerError",
    "Pool",
    "Quantization",
    "RailError",
    "Region",
    "RegionDescriptor",
    "Share",
    "Transfer",
    "TransferError",
    "Trigger",
    "UsageError",
    "route",
    "use_huge_pages",
]


def __getattr__(name: str) -> Any:
    module = name if name in _MODULES else _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
    import importlib

    try:
        found = importlib.import_module(f"kvxfer.{module}")
    except ModuleNotFoundError as error:
        if error.name != "kvxfer._native":
            raise
        raise ModuleNotFoundError(
            f"{__path__[0]} is a source tree in which nothing was built: start Python elsewhere to use the "
            "kvxfer that is installed, or build here (pip install --editable ., or make setup)",
            name=error.name,
        ) from None
    value = found if name in _MODULES else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
