"""The engine's cache tensors as regions of a worker's agent."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from vllm.model_executor.models.utils import extract_layer_index

import kvxfer
from kvxfer.connectors.vllm.cache_groups import CacheGroup
from kvxfer.connectors.vllm.place import Place
from kvxfer.slices import heads_of

# A region of nothing: reads of no block of it carry notes, whatever layers a rank holds.
_NOTES: Final = "notes"
_NULL_BLOCK: Final = 0


class CacheRegions:
    """One region for each cache group, and one for notes.

    A page of a region is what the engine's kernels call a block, which may be a part of what its
    block tables do.

    Parameters
    ----------
    agent
        Of this worker.
    groups
        Cache groups that are transferred.
    caches
        As the engine registers them: a tensor [block, head, token, content] for each layer.
    place
        Of this worker.

    Raises
    ------
    kvxfer.UsageError
        The tensors lie where no agent reaches (device memory), or in an order that is not known.
    """

    def __init__(
        self,
        agent: kvxfer.Agent,
        groups: tuple[CacheGroup, ...],
        caches: dict[str, Any],
        place: Place,
    ) -> None:
        self.groups = groups
        self.regions: list[kvxfer.Region] = []
        self.pages_per_block: list[int] = []
        for group in groups:
            tensors = [caches[name] for name in group.layer_names]
            num_pages, num_heads, *_ = tensors[0].shape
            if tensors[0].ndim != 4 or num_pages % place.num_blocks:
                raise NotImplementedError(
                    f"KvxferConnector reads caches [block, head, token, content]; {group.layer_names[0]} has "
                    f"{tuple(tensors[0].shape)}, of {place.num_blocks} blocks"
                )
            latent = num_heads == 1 and getattr(group.spec, "head_size_v", 0) == 0
            if latent:
                first_head, all_heads = 0, 1  # alike on every rank
            elif num_heads == max(place.total_heads // place.tp_size, 1):
                first_head, _ = heads_of(place.total_heads, place.tp_size, place.tp_rank)
                all_heads = place.total_heads
            else:
                # Slots of the kernel's own: a shard matches the same shard alone.
                first_head, all_heads = place.tp_rank * num_heads, place.tp_size * num_heads
            dtype = _dtype(place.cache_dtype)
            # Nothing is converted on the way: the scales of a quantized cache are the engine's, and are
            # not told to its connector.
            declared = f"{place.model}, {dtype or tensors[0].dtype}"
            if tensors[0].device.type == "cpu":
                # The kernels of the CPU lay a head's page out as their instructions and its type like it.
                views = [tensor.view(num_pages, num_heads, -1) for tensor in tensors]
                axes, declared = "bhd", f"{declared}, packed for {_instructions()}"
            else:
                views, axes = tensors, "bhtd" if latent else "bhtc"
            layout = kvxfer.KVLayout.from_tensors(
                views,
                axes,
                dtype=dtype,
                first_head=first_head,
                total_heads=all_heads,
                null_block=_NULL_BLOCK,
                **_stage(groups, place),
                model=declared,
                group=group.name,
            )
            self.regions.append(agent.register(group.name, tensors, layout))
            self.pages_per_block.append(num_pages // place.num_blocks)
        self.notes = agent.register(_NOTES, np.zeros((1, 1), np.uint8))
        self._positions = {
            name: (index, position)
            for index, group in enumerate(groups)
            for position, name in enumerate(group.layer_names)
        }

    def position(self, layer_name: str) -> tuple[int, int]:
        """Returns a layer's group and its place in the group's region; (-1, 0) where it has none."""
        return self._positions.get(layer_name, (-1, 0))


def _instructions() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _stage(groups: tuple[CacheGroup, ...], place: Place) -> dict[str, Any]:
    """Returns which layers a worker has that shares the model's with others."""
    if place.pp_size == 1:
        return {}
    if len(groups) != 1:
        raise NotImplementedError(
            f"KvxferConnector cannot hand over {len(groups)} cache groups with pipeline_parallel_size "
            f"{place.pp_size} yet: which of a group's layers a worker has is known for one group alone"
        )
    layers = [extract_layer_index(name) for name in groups[0].layer_names]
    if layers != list(range(layers[0], layers[0] + len(layers))):
        raise NotImplementedError(
            f"KvxferConnector cannot hand over layers {layers} of a stage: they leave gaps"
        )
    return {"first_layer": layers[0], "total_layers": place.num_layers}


def _dtype(cache_dtype: str) -> str | None:
    if cache_dtype.startswith("fp8"):
        return "float8_e5m2" if "e5m2" in cache_dtype else "float8_e4m3fn"
    return None


def remote_region(peer: kvxfer.Peer, name: str) -> kvxfer.RegionDescriptor:
    """Returns a peer's region that holds what ours of this name does."""
    remote = peer.regions.get(name)
    if remote is None:
        raise kvxfer.UsageError(
            f"{peer.name} has no region {name}: both engines run one model with one kind of cache manager",
            code="unknown-region",
            peer=peer.name,
        )
    return remote
