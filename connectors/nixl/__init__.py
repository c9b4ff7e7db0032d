"""NIXL's Python interface, kept by kvxfer: programs that are written for NIXL run on it unchanged.

Under its own name (``from kvxfer.connectors.nixl import nixl_agent``), or as ``nixl`` where a program asks
for that: by `install_as_nixl`, or by installing the distribution in ``distribution/``. README.md says what is
the same, what is stricter and what is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from kvxfer.connectors.nixl import _api, _bindings, _utils, logging
from kvxfer.connectors.nixl._api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
)

__all__ = [
    "DEFAULT_COMM_PORT",
    "install_as_nixl",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
    "plugin_folder",
]

_PARTS = {"_api": _api, "_bindings": _bindings, "_utils": _utils, "logging": logging}


def plugin_folder() -> Path:
    """Returns the folder of ``libplugin_KVXFER.so``, for ``NIXL_PLUGIN_DIR``: a backend of NIXL's own agent.

    Raises
    ------
    FileNotFoundError
        This build has no plug-in.
    """
    native = importlib.util.find_spec("kvxfer._native")
    assert native is not None
    assert native.origin is not None
    folder = Path(native.origin).parent / "nixl_plugins"
    if not (folder / "libplugin_KVXFER.so").exists():
        raise FileNotFoundError(f"no libplugin_KVXFER.so in {folder}: install kvxfer from a wheel")
    return folder


def install_as_nixl(*, replace: bool = False) -> None:
    """Has ``import nixl``, and what it imports of it, find this package in the running process.

    Parameters
    ----------
    replace
        Whether also where NIXL itself is installed. What was imported of it before stays as it is.

    Raises
    ------
    ImportError
        NIXL is installed, and `replace` was not asked for.
    """
    if not replace and importlib.util.find_spec("nixl") is not None and "nixl" not in sys.modules:
        raise ImportError("nixl is installed: install_as_nixl(replace=True) has kvxfer stand in for it")
    sys.modules["nixl"] = sys.modules[__name__]
    for name, part in _PARTS.items():
        sys.modules[f"nixl.{name}"] = part
