"""The engine's caches as regions of a worker's agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import kvxfer
from kvxfer import plan
from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.ending import deregister
from kvxfer.connectors.common.paging import GroupTable

#: A region of one byte that a worker's agent has until its engine's first step.
STARTING: Final = "starting"


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """The memory that holds the pages of one cache group.

    Attributes
    ----------
    tensors
        The tensors that `layout` describes, as `kvxfer.Agent.register` takes them.
    pages_per_block
        Pages of the region in one block of the block tables. A page is what the engine's kernels call a
        block; it may be smaller than a block of the tables. Groups that share a table have the same value.
    """

    group: CacheGroup
    tensors: Any
    layout: kvxfer.KVLayout
    pages_per_block: int = 1


class CacheRegions:
    """The regions of a worker's caches: one for each cache group, or part of a group.

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
        """Registers the caches with the agent, also again after `deregister`."""
        if not self._is_registered:
            self.regions = [
                self._agent.register(each.group.name, each.tensors, each.layout) for each in self._memory
            ]
            self._is_registered = True

    def deregister(self) -> None:
        """Deregisters the caches: when this returns, no peer touches a byte of them any more.

        Transfers that name the old regions fail.
        """
        deregister(self.regions)
        self._is_registered = False

    def position(self, layer_name: str) -> tuple[int, int]:
        """Returns a layer's group and its index in the group's region; (-1, 0) if it has none.

        Layers with states have none: forwards do not report when such a layer is computed or needed.
        """
        return self._positions.get(layer_name, (-1, 0))


def remote_region(peer: kvxfer.Peer, name: str) -> kvxfer.RegionDescriptor:
    """Returns a peer's region with the same name as one of ours.

    Raises
    ------
    UsageError
        ``unknown-region``: it has none, perhaps because its engine has not begun to step, or sleeps.
    """
    regions = peer.regions
    if (remote := regions.get(name)) is not None:
        return remote
    if regions.keys() <= {STARTING}:
        what = (
            "no cache yet: its engine is starting" if regions else "no cache now: its engine starts or sleeps"
        )
    else:
        what = f"no region {name}: both engines must run the same model with the same kind of cache manager"
    raise kvxfer.UsageError(f"{peer.name} has {what}", code="unknown-region", peer=peer.name)


def require_started(peer: kvxfer.Peer) -> None:
    """Raises `kvxfer.UsageError` (``unknown-region``) if a peer's engine has not begun to step.

    A prompt that it is asked to push may then never reach it: its server does not listen yet.
    """
    if STARTING in peer.regions:
        raise kvxfer.UsageError(
            f"{peer.name} pushes no prompt yet: its engine is starting", code="unknown-region", peer=peer.name
        )


def require_alike(region: kvxfer.Region, remote: kvxfer.RegionDescriptor) -> None:
    """Raises `kvxfer.UsageError` (``layout-mismatch``) if no page can be copied between two caches.

    Copying may be possible in one direction only, e.g. with page scales, which are computed in one direction.
    Then the transfer decides.
    """
    reasons = plan.differences(region.layout, remote.layout)
    if reasons and plan.differences(remote.layout, region.layout):
        raise kvxfer.UsageError(
            f"the caches of this engine (source) and {remote.agent} (destination) differ in region "
            f"{region.name!r}: {'; '.join(reasons)}",
            code="layout-mismatch",
            peer=remote.agent,
        )
