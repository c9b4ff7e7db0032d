"""The engine's caches as regions of a worker's agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kvxfer
from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.paging import GroupTable


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Where the pages of one cache group are.

    Attributes
    ----------
    tensors
        What `layout` was read off, as `kvxfer.Agent.register` takes it.
    pages_per_block
        A page of the region is what the engine's kernels call a block, which may be a part of what its
        block tables do. All groups of one table have the same.
    """

    group: CacheGroup
    tensors: Any
    layout: kvxfer.KVLayout
    pages_per_block: int = 1


class CacheRegions:
    """One region for each cache group, or part of one.

    Parameters
    ----------
    agent
        Of this worker.
    memory
        The groups that are transferred.
    """

    def __init__(self, agent: kvxfer.Agent, memory: Sequence[CacheMemory]) -> None:
        self.groups = [each.group for each in memory]
        self.pages_per_block = [each.pages_per_block for each in memory]
        self.regions: list[kvxfer.Region] = []
        self._agent = agent
        self._memory = memory
        self._is_registered = False
        self.register()
        self._positions = {
            name: (index, position)
            for index, group in enumerate(self.groups)
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
            self.regions = [
                self._agent.register(each.group.name, each.tensors, each.layout) for each in self._memory
            ]
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
