"""Reads the engine's cache groups from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.vllm.state_parts import part_names

# Shapes of layers in one group.
MAX_SHAPES: Final = 4
# Exactly these kinds: kinds derived from them keep other things in a page.
_SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecGroup(CacheGroup):
    """A cache group with the engine's description of it.

    Attributes
    ----------
    spec
        The engine's specification of each of its layers.
    part
        The part of its states (`kvxfer.connectors.vllm.state_parts`); "" for whole rows.
    """

    spec: Any
    part: str = ""


def groups_of(config: KVCacheConfig) -> tuple[SpecGroup, ...]:
    """Returns the engine's groups that are transferred.

    Raises
    ------
    NotImplementedError
        A group is of a kind that this connector cannot hand over yet.
    """
    groups: list[SpecGroup] = []
    num_tables = 0
    for index in config.transfer_group_ids:
        group = config.kv_cache_groups[index]
        spec = group.kv_cache_spec
        # A draft's layers may differ in shape from the model's. A pipeline stage may lack layers of a group.
        layers: dict[Any, list[str]] = {} if group.layer_names else {spec: []}
        for name in group.layer_names:
            own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            layers.setdefault(own, []).append(name)
        for each in layers:
            is_state = isinstance(each, MambaSpec)
            if type(each) not in _SUPPORTED or not (is_state or each.tokens_per_state == 1):
                raise NotImplementedError(
                    f"KvxferConnector cannot hand over cache group {index} ({type(each).__name__}) yet: "
                    "full attention, latent attention (MLA), sliding windows, Mamba and GDN are supported"
                )
            if len(layers) > (1 if is_state else MAX_SHAPES):
                raise NotImplementedError(
                    f"KvxferConnector cannot hand over cache group {index} yet: its layers have "
                    f"{len(layers)} shapes"
                )
        for shape, (each, names) in enumerate(layers.items()):
            is_state = isinstance(each, MambaSpec)
            window = each.sliding_window if isinstance(each, SlidingWindowSpec) else 0
            for at, part in enumerate(part_names(each) if is_state else ("",)):
                name = f"kv.{index}" + (f".{part or shape}" if part or shape else "")
                groups.append(
                    SpecGroup(
                        index=index,
                        name=name,
                        layer_names=tuple(names),
                        block_size=spec.block_size,
                        window=window,
                        is_state=is_state,
                        table=num_tables + at,
                        shape=shape,
                        spec=each,
                        part=part,
                    )
                )
        num_tables = groups[-1].table + 1
    return tuple(groups)
