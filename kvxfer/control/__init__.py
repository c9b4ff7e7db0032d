"""The node's daemon: what it knows of the agents that attach, and its REST API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.control.client.client_error import ControlError as ControlError
    from kvxfer.control.client.client_events import Missed as Missed
    from kvxfer.control.client.client_exchange import Retry as Retry
    from kvxfer.control.client.daemon_directory import DaemonDirectory as DaemonDirectory
    from kvxfer.control.client.rest_client import AsyncClient as AsyncClient
    from kvxfer.control.client.rest_client import Client as Client
    from kvxfer.control.host_pool.page_layout import layout_digest as layout_digest

# Loaded on demand: a program that only hands memory over needs none of the modules behind these.
_PLACES = {
    "AsyncClient": "client.rest_client",
    "Client": "client.rest_client",
    "ControlError": "client.client_error",
    "DaemonDirectory": "client.daemon_directory",
    "Missed": "client.client_events",
    "Retry": "client.client_exchange",
    "layout_digest": "host_pool.page_layout",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
