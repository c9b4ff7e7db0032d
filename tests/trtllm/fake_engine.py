"""The part of TensorRT-LLM that its connectors see, after the recorded contract: no engine, no torch.

`install` puts it where the connector looks for the engine. Abstract methods, signatures and names follow the
contract (`test_engine_interface` checks this); the code is this project's own.
"""

from __future__ import annotations

import sys
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.trtllm.contract import interface

#: The engine's names of a request's states.
CONTEXT, GENERATION, COMPLETE = "CONTEXT_INIT", "GENERATION_IN_PROGRESS", "GENERATION_COMPLETE"
LOADING, SAVING = "DISAGG_GENERATION_TRANS_IN_PROGRESS", "DISAGG_CONTEXT_TRANS_IN_PROGRESS"

_PACKAGE: Final = "tensorrt_llm"


class LlmRequest:
    """The engine's request: what its bindings show."""

    def __init__(
        self, request_id: int, tokens: list[int], max_new_tokens: int, cache_salt: str | None
    ) -> None:
        self.request_id = request_id
        self.prompt_len = len(tokens)
        self.max_new_tokens = max_new_tokens
        self.state = CONTEXT
        self.context_current_position = 0
        self.cache_salt = cache_salt
        self.lora_task_id = None
        self.is_dummy_request = False
        self.is_generation_only_request = False
        self._tokens = list(tokens)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self._tokens)

    def add_new_token(self, token: int, beam: int) -> None:
        assert beam == 0
        self._tokens.append(token)

    @property
    def is_generation_complete_state(self) -> bool:
        return self.state == COMPLETE

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position


class _Worker:
    """What the methods of the engine's worker do that are not abstract."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Callable[..., Any] | None:
        return None

    def register_kv_cache_layout(self, layout: Any) -> None:
        raise NotImplementedError


class _Scheduler:
    """The same of its scheduler."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    def request_finished_by_layer_group(
        self: Any, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> Any:
        (only,) = cache_block_ids_by_layer_group
        return self.request_finished(request, only)

    def update_state_after_alloc_by_layer_group(
        self: Any, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        (only,) = block_ids_by_layer_group
        self.update_state_after_alloc(request, only)

    def wait_for_initialization(self) -> None:
        return


@dataclass(frozen=True)
class KvCacheBufferRef:
    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class KvCacheRegion:
    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]

    def address_of(self, slot_id: int) -> int:
        if not 0 <= slot_id < self.num_slots:
            raise IndexError(slot_id)
        return self.base + slot_id * self.stride

    def as_tensor(self, dtype: Any = np.uint8) -> NDArray[np.uint8]:
        pool = POOLS[self.base]
        return np.lib.stride_tricks.as_strided(pool, (self.num_slots, self.size), (self.stride, 1))


#: Memory by its address, which is all that the engine has.
POOLS: dict[int, NDArray[np.uint8]] = {}


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]
    replicated_regions: tuple[KvCacheRegion, ...] = ()

    @property
    def bytes_per_page(self) -> int:
        return sum(region.size for region in self.regions)

    @property
    def replicated_bytes_per_page(self) -> int:
        return sum(region.size for region in self.replicated_regions)


@dataclass(frozen=True)
class KvCacheLayout:
    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    gpu_pool_mapping_bytes: int | None = None

    def group(self, layer_group_id: int) -> KvCacheLayerGroupLayout:
        return next(each for each in self.groups if each.layer_group_id == layer_group_id)

    def group_of_layer(self, layer_id: int) -> KvCacheLayerGroupLayout:
        return next(each for each in self.groups if layer_id in each.layer_ids)


_HALVES: Final = {"KvCacheConnectorWorker": _Worker, "KvCacheConnectorScheduler": _Scheduler}
_LAYOUT: Final = (KvCacheLayout, KvCacheLayerGroupLayout, KvCacheRegion, KvCacheBufferRef)


@cache
def classes_of(release: str) -> dict[str, type]:
    """Returns a release's classes by the engine's names: the contract's members, which do what is here."""
    found: dict[str, type] = {cls.__name__: cls for cls in _LAYOUT}
    recorded = interface(release).classes
    for name in recorded.keys() - found.keys():
        does = _HALVES.get(name)
        found[name] = _data(name, recorded[name]) if does is None else _half(name, recorded[name], does)
    return {name: found[name] for name in recorded}


def _half(name: str, members: dict[str, str], does: type) -> type:
    made: dict[str, Any] = {"__module__": __name__}
    for each, what in members.items():
        if what.startswith("abstract "):
            exec(f"def {each}{what.partition('method ')[2]}: ...", made)
            made[each] = abstractmethod(made[each])
        elif what != "attribute" or each in vars(does):
            made[each] = vars(does)[each]
    made.pop("__builtins__", None)
    return ABCMeta(name, (ABC,), made)


def _data(name: str, members: dict[str, str]) -> type:
    fields: list[Any] = [(each, Any) for each, what in members.items() if what == "field"]
    fields += [
        (each, Any, field(default_factory=list)) for each, what in members.items() if what == "field ="
    ]
    return make_dataclass(name, fields, namespace={"__module__": __name__})


class OneRank:
    """The messages between ranks, for an engine of one rank."""

    rank, size = 0, 1

    def allgather(self, own: Any) -> list[Any]:
        return [own]

    def broadcast(self, own: Any) -> Any:
        return own


def install(release: str, ranks: Any = None, manager: type | None = None) -> ModuleType:
    """Puts the engine where connectors look for it, and returns the module of its interface."""
    ranks = ranks or OneRank()
    uninstall()
    utils = module(f"{_PACKAGE}._utils")
    utils.mpi_rank = lambda: ranks.rank  # type: ignore[attr-defined]
    utils.mpi_world_size = lambda: ranks.size  # type: ignore[attr-defined]
    utils.mpi_allgather = lambda own: ranks.allgather(own)  # type: ignore[attr-defined]
    utils.mpi_broadcast = lambda own, root: ranks.broadcast(own)  # type: ignore[attr-defined]
    found = module(interface(release).module)
    vars(found).update(classes_of(release))
    vars(found)["KvCacheConnectorManager"] = manager or type(
        "KvCacheConnectorManager", (), {"get_finished": lambda self: None}
    )
    return found


def uninstall() -> None:
    """Removes it again, with the connector's modules that use it."""
    for name in list(sys.modules):
        if name.partition(".")[0] == _PACKAGE or name.startswith("kvxfer.connectors.trtllm."):
            del sys.modules[name]
    package = sys.modules.get("kvxfer.connectors.trtllm")
    for name in ("interface", "leader", "rank_worker"):
        vars(package).pop(name, None) if package is not None else None


def llm_args(tp_size: int = 1, block_size: int = 4, **changes: Any) -> SimpleNamespace:
    """Returns the engine's start-up arguments."""
    cache = SimpleNamespace(tokens_per_block=block_size)
    return _Args(model="/models/tiny", tensor_parallel_size=tp_size, kv_cache_config=cache, **changes)


class _Args(SimpleNamespace):
    pass


def module(name: str) -> ModuleType:
    """Returns a module of the engine; makes it and its parents if they are missing."""
    made = sys.modules.get(name)
    if made is None:
        made = sys.modules[name] = ModuleType(name)
        made.__path__ = []
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(module(parent), own, made)
    return made
