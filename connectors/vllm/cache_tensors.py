"""Describes the engine's cache tensors as layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

import kvxfer
from kvxfer.connectors.common.regions import CacheMemory
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.vllm.cache_groups import SpecGroup
from kvxfer.connectors.vllm.state_parts import part_of
from kvxfer.layout.slices import heads_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_NULL_BLOCK: Final = 0


@dataclass(frozen=True, slots=True)
class ModelCache:
    """Facts about an engine's cache that its tensors do not show.

    Attributes
    ----------
    model
        Declared name of the model.
    cache_dtype
        The engine's setting, e.g. ``"auto"`` or ``"fp8"``.
    total_heads
        KV heads of the model.
    num_blocks
        Of the engine's cache.
    packed_for
        The CPU instruction set, if the kernels lay out a head's part of a page by it; empty if the order is
        that of the tensor's axes, token by token.
    num_layers
        Layers of the model; 0 if every worker has all of them.
    """

    model: str
    cache_dtype: str
    total_heads: int
    num_blocks: int
    packed_for: str = ""
    num_layers: int = 0

    @classmethod
    def of(cls, config: VllmConfig, num_blocks: int, name: str) -> ModelCache:
        """Reads an engine's configuration; `name` is the user's name for the model, or ""."""
        import torch

        model = config.model_config
        is_staged = config.parallel_config.pipeline_parallel_size > 1
        return cls(
            model=(name or _declared(model)) + _declared_draft(config),
            cache_dtype=str(config.cache_config.cache_dtype),
            total_heads=model.get_total_num_kv_heads(),
            num_blocks=num_blocks,
            # CPU kernels lay a page out by their instruction set and by its dtype.
            packed_for=str(torch.backends.cpu.get_cpu_capability()) if current_platform.is_cpu() else "",
            num_layers=model.hf_text_config.num_hidden_layers if is_staged else 0,
        )


def _declared(model: ModelConfig) -> str:
    sizes = "/".join(
        f"{name} {getattr(model.hf_text_config, name, 0)}"
        for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    declared = f"{'+'.join(model.hf_config.architectures or ['?'])}/{sizes}"
    # Prefer the commit that the hub resolved: the user's revision may be a branch, which moves on.
    revision = getattr(model.revision, "resolved", model.revision)
    return f"{declared}/revision {revision}" if revision else declared


def _declared_draft(config: VllmConfig) -> str:
    """Returns the declared name of a draft model, whose layers are in the cache beside the model's."""
    speculative = config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return ""
    return f", --speculative-config {speculative.method} {_declared(speculative.draft_model_config)}"


def memory_of(
    groups: Sequence[SpecGroup], caches: dict[str, Any], cache: ModelCache, position: WorkerRank
) -> list[CacheMemory]:
    """Returns the memory that holds the pages of each group.

    Parameters
    ----------
    groups
        Cache groups that are transferred.
    caches
        As the engine registers them: a tensor [block, head, token, content] for each layer.
    cache, position
        Of this worker.

    Raises
    ------
    NotImplementedError
        The tensors do not lie where `position` says, or in an order that is not known.
    """
    found: list[CacheMemory] = []
    for group in groups:
        tensors = [caches[name] for name in group.layer_names]
        _require_memory(group, tensors, position)
        num_pages, _, *_ = tensors[0].shape
        if tensors[0].ndim != 4 or num_pages % cache.num_blocks:
            raise NotImplementedError(
                f"KvxferConnector reads caches [block, head, token, content]; {group.layer_names[0]} has "
                f"{tuple(tensors[0].shape)}, of {cache.num_blocks} blocks"
            )
        pages = (
            _states(group, tensors, position) if group.is_state else _tokens(group, tensors, cache, position)
        )
        declared = f"{cache.model}, {pages.declared}"
        if cache.packed_for:
            declared = f"{declared}, packed for {cache.packed_for}"
        layout = kvxfer.KVLayout.from_tensors(
            pages.views,
            pages.axes,
            dtype=pages.dtype,
            first_head=pages.first_head,
            total_heads=pages.total_heads,
            null_block=_NULL_BLOCK,
            **_stage(groups, cache, position),
            model=declared,
            group=group.name,
        )
        pages_per_block = num_pages // cache.num_blocks
        if group.shape and pages_per_block != found[-1].pages_per_block:
            raise NotImplementedError(
                f"KvxferConnector cannot hand over cache group {group.index} yet: its layers divide a block "
                "into different numbers of pages"
            )
        found.append(CacheMemory(group, pages.views, layout, pages_per_block))
    return found


def _require_memory(group: SpecGroup, tensors: list[Any], position: WorkerRank) -> None:
    """Refuses tensors on another device: a push would not wait for that device's kernels."""
    expected = "cpu" if position.gpu is None else f"cuda:{position.gpu}"
    devices = sorted({str(tensor.device) for tensor in tensors} - {expected})
    if devices:
        raise NotImplementedError(
            f"KvxferConnector cannot hand over the cache of {group.layer_names[0]} on {devices[0]}: this "
            f"worker computes on {expected}. Engines on CPUs and on NVIDIA GPUs work"
        )


@dataclass(frozen=True, slots=True)
class _Pages:
    """A group's tensors as `kvxfer.KVLayout.from_tensors` reads them, with facts that they do not show."""

    views: list[Any]
    axes: str
    first_head: int
    total_heads: int
    declared: str
    dtype: str | None = None


def _tokens(group: SpecGroup, tensors: list[Any], cache: ModelCache, position: WorkerRank) -> _Pages:
    num_pages, num_heads, *_ = tensors[0].shape
    latent = num_heads == 1 and getattr(group.spec, "head_size_v", 0) == 0
    if latent:
        first_head, total_heads = 0, 1  # equal on every rank
    elif num_heads == max(cache.total_heads // position.tp_size, 1):
        first_head, _ = heads_of(cache.total_heads, position.tp_size, position.tp_rank)
        total_heads = cache.total_heads
    else:
        # The kernel uses its own slots: a shard matches only the same shard.
        first_head, total_heads = position.tp_rank * num_heads, position.tp_size * num_heads
    dtype = _dtype(cache.cache_dtype)
    # No conversion is possible: the engine does not give the scales of a quantized cache to its connector.
    declared = str(dtype or tensors[0].dtype)
    if cache.packed_for:
        views, axes = [tensor.view(num_pages, num_heads, -1) for tensor in tensors], "bhd"
    else:
        views, axes = tensors, "bhtd" if latent else "bhtc"
    return _Pages(views, axes, first_head, total_heads, declared, dtype)


def _states(group: SpecGroup, tensors: list[Any], position: WorkerRank) -> _Pages:
    part = part_of(group.part, group.spec, tensors)
    tp_rank, tp_size = (0, 1) if group.spec.tp_replicated else (position.tp_rank, position.tp_size)
    return _Pages(part.views, part.axes, tp_rank * part.num_heads, tp_size * part.num_heads, part.declared)


def _stage(groups: Sequence[SpecGroup], cache: ModelCache, position: WorkerRank) -> dict[str, Any]:
    """Returns the layers of a worker's pipeline stage; empty without pipeline parallelism."""
    if position.pp_size == 1:
        return {}
    if len(groups) != 1:
        raise NotImplementedError(
            f"KvxferConnector cannot hand over {len(groups)} cache groups with pipeline_parallel_size "
            f"{position.pp_size} yet: only with a single group does kvxfer know which layers a worker has"
        )
    layers = [extract_layer_index(name) for name in groups[0].layer_names]
    if layers != list(range(layers[0], layers[0] + len(layers))):
        raise NotImplementedError(
            f"KvxferConnector cannot hand over layers {layers} of a stage: they are not consecutive"
        )
    return {"first_layer": layers[0], "total_layers": cache.num_layers}


def _dtype(cache_dtype: str) -> str | None:
    if cache_dtype.startswith("fp8"):
        return "float8_e5m2" if "e5m2" in cache_dtype else "float8_e4m3fn"
    return None
