"""The engine's cache tensors as regions of a worker's agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vllm.model_executor.models.utils import extract_layer_index

import kvxfer
from kvxfer.connectors.vllm.cache_groups import CacheGroup
from kvxfer.connectors.vllm.paging import GroupTable
from kvxfer.connectors.vllm.place import Place
from kvxfer.connectors.vllm.state_parts import part_of
from kvxfer.layout.slices import heads_of

_NULL_BLOCK: Final = 0


class CacheRegions:
    """One region for each cache group, or part of its states.

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
    NotImplementedError
        The tensors do not lie where `place` says, or in an order that is not known.
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
        self._agent = agent
        self._memory: list[tuple[str, list[Any], kvxfer.KVLayout]] = []
        self._is_registered = False
        self.pages_per_block: list[int] = []
        for group in groups:
            tensors = [caches[name] for name in group.layer_names]
            _require_memory(group, tensors, place)
            num_pages, _, *_ = tensors[0].shape
            if tensors[0].ndim != 4 or num_pages % place.num_blocks:
                raise NotImplementedError(
                    f"KvxferConnector reads caches [block, head, token, content]; {group.layer_names[0]} has "
                    f"{tuple(tensors[0].shape)}, of {place.num_blocks} blocks"
                )
            pages = _states(group, tensors, place) if group.is_state else _tokens(group, tensors, place)
            declared = f"{place.model}, {pages.declared}"
            if place.packed_for:
                declared = f"{declared}, packed for {place.packed_for}"
            layout = kvxfer.KVLayout.from_tensors(
                pages.views,
                pages.axes,
                dtype=pages.dtype,
                first_head=pages.first_head,
                total_heads=pages.total_heads,
                null_block=_NULL_BLOCK,
                **_stage(groups, place),
                model=declared,
                group=group.name,
            )
            self._memory.append((group.name, pages.views, layout))
            self.pages_per_block.append(num_pages // place.num_blocks)
            if group.shape and self.pages_per_block[-1] != self.pages_per_block[-2]:
                raise NotImplementedError(
                    f"KvxferConnector cannot hand over cache group {group.index} yet: its layers divide a "
                    "block into unlike pages"
                )
        self.register()
        self._positions = {
            name: (index, position)
            for index, group in enumerate(groups)
            for position, name in enumerate(group.layer_names)
            if not group.is_state
        }

    def table(self, index: int, blocks: tuple[int, ...]) -> GroupTable:
        """Returns some of this engine's blocks as a table of one group."""
        group = self.groups[index]
        return GroupTable(blocks, group.block_size, self.pages_per_block[index], group.is_state)

    def register(self) -> None:
        """Makes the caches known to peers; anew, where `deregister` took them away."""
        if not self._is_registered:
            self.regions = [self._agent.register(*each) for each in self._memory]
            self._is_registered = True

    def deregister(self) -> None:
        """Takes the caches away from peers: when this returns, no byte of them is touched any more.

        Transfers of the regions of before fail.
        """
        for region in self.regions:
            region.deregister_blocking()
        self._is_registered = False

    def position(self, layer_name: str) -> tuple[int, int]:
        """Returns a layer's group and its place in the group's region; (-1, 0) where it has none.

        Forwards do not say that a layer's states are there, or needed: they have none.
        """
        return self._positions.get(layer_name, (-1, 0))


def _require_memory(group: CacheGroup, tensors: list[Any], place: Place) -> None:
    """Refuses what a push would read before it is computed: whose kernels' stream nobody waits for."""
    expected = "cpu" if place.gpu is None else f"cuda:{place.gpu}"
    devices = sorted({str(tensor.device) for tensor in tensors} - {expected})
    if devices:
        raise NotImplementedError(
            f"KvxferConnector cannot hand over the cache of {group.layer_names[0]} on {devices[0]}: this "
            f"worker computes on {expected}. Engines on CPUs and on NVIDIA GPUs work"
        )


@dataclass(frozen=True, slots=True)
class _Pages:
    """Tensors of a group as `kvxfer.KVLayout.from_tensors` reads them, and what they do not tell."""

    views: list[Any]
    axes: str
    first_head: int
    total_heads: int
    declared: str
    dtype: str | None = None


def _tokens(group: CacheGroup, tensors: list[Any], place: Place) -> _Pages:
    num_pages, num_heads, *_ = tensors[0].shape
    latent = num_heads == 1 and getattr(group.spec, "head_size_v", 0) == 0
    if latent:
        first_head, total_heads = 0, 1  # alike on every rank
    elif num_heads == max(place.total_heads // place.tp_size, 1):
        first_head, _ = heads_of(place.total_heads, place.tp_size, place.tp_rank)
        total_heads = place.total_heads
    else:
        # Slots of the kernel's own: a shard matches the same shard alone.
        first_head, total_heads = place.tp_rank * num_heads, place.tp_size * num_heads
    dtype = _dtype(place.cache_dtype)
    # Nothing is converted on the way: the scales of a quantized cache are the engine's, and are
    # not told to its connector.
    declared = str(dtype or tensors[0].dtype)
    if place.packed_for:
        views, axes = [tensor.view(num_pages, num_heads, -1) for tensor in tensors], "bhd"
    else:
        views, axes = tensors, "bhtd" if latent else "bhtc"
    return _Pages(views, axes, first_head, total_heads, declared, dtype)


def _states(group: CacheGroup, tensors: list[Any], place: Place) -> _Pages:
    part = part_of(group.part, group.spec, tensors)
    tp_rank, tp_size = (0, 1) if group.spec.tp_replicated else (place.tp_rank, place.tp_size)
    return _Pages(part.views, part.axes, tp_rank * part.num_heads, tp_size * part.num_heads, part.declared)


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
