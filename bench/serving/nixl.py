"""vLLM's NixlConnector, observed, with one more setting of NIXL, which it does not pass on itself.

``"kv_connector_extra_config": {"progress_thread": false}`` keeps NIXL from starting its progress thread.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from kvxfer.bench.serving import observer as serving_observer


def _with_setting(connector: type[Any]) -> type[Any]:
    class NixlConnector(connector):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            wanted = vllm_config.kv_transfer_config.kv_connector_extra_config.get("progress_thread")
            if wanted is not None:
                # The module that creates the agent, and its name for the configuration.
                maker: Any = importlib.import_module(f"{_package(connector)}.base_worker")
                maker.nixl_agent_config = functools.partial(
                    importlib.import_module("nixl._api").nixl_agent_config, enable_prog_thread=wanted
                )
            super().__init__(vllm_config, role, kv_cache_config)

    return NixlConnector


def _package(connector: type[Any]) -> str:
    """Returns the package of vLLM's class, which the observed one is derived from."""
    modules = [base.__module__ for base in connector.__mro__]
    return next(module.rpartition(".")[0] for module in modules if module.startswith("vllm."))


@functools.cache
def _named(name: str) -> type[Any]:
    return _with_setting(getattr(serving_observer, name))


def __getattr__(name: str) -> type[Any]:
    if not name.endswith("Connector"):
        raise AttributeError(name)
    return _named(name)
