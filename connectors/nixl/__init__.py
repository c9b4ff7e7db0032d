"""NIXL's Python interface, implemented by kvxfer: programs written for NIXL run on it unchanged.

Import it under its own name (``from kvxfer.connectors.nixl import nixl_agent``). For programs that import
``nixl``, call `install_as_nixl`, or install the distribution in ``distribution/``. README.md lists the calls
that are the same, stricter or missing.
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
    """Returns the folder of ``libplugin_KVXFER.so``, a backend for NIXL's own agent, for ``NIXL_PLUGIN_DIR``.

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
    """Makes ``import nixl``, and imports of its modules, find this package in the running process.

    Parameters
    ----------
    replace
        Whether to do so even if NIXL itself is installed. Modules that were imported before stay NIXL's.

    Raises
    ------
    ImportError
        NIXL is installed, and `replace` was not asked for.
    """
    if not replace and importlib.util.find_spec("nixl") is not None and "nixl" not in sys.modules:
        raise ImportError("nixl is installed: install_as_nixl(replace=True) puts kvxfer in its place")
    sys.modules["nixl"] = sys.modules[__name__]
    for name, part in _PARTS.items():
        sys.modules[f"nixl.{name}"] = part
