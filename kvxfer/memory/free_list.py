"""The free blocks of a pool, and the owners of the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ExhaustedError, invalid
from kvxfer.memory.block_table import BlockTable, as_ids

_FREE = -1


class BlockFreeList:
    """Hands out block ids and takes them back, each with the name of its owner.

    The lowest free ids go first, so that a request's blocks are adjacent where possible; adjacent blocks move
    as one run. Not thread-safe: `Pool` has a lock.

    Parameters
    ----------
    num_blocks
        Ids are 0 to ``num_blocks - 1``, all free.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise invalid(f"a pool must have 0 or more blocks, not {num_blocks}")
        self._owner = np.full(num_blocks, _FREE, np.int32)  # [num_blocks] index in _names
        self._num_free = num_blocks
        self._names: dict[str, int] = {}
        self._held: dict[int, int] = {}  # owner's index -> its number of blocks

    @property
    def num_blocks(self) -> int:
        """Number of all blocks, free or not."""
        return len(self._owner)

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can give."""
        return self._num_free

    def allocate(self, num_blocks: int, owner: str) -> NDArray[np.uint32]:
        """Returns the ids of `num_blocks` blocks, ascending, which now belong to `owner`.

        All or nothing. O(blocks of the pool), about 1 µs for each 4096.

        Raises
        ------
        ExhaustedError
            Not enough are free; the message names the largest owners.
        """
        if num_blocks < 0:
            raise invalid(f"allocate() was called for {num_blocks} blocks")
        if num_blocks > self._num_free:
            raise ExhaustedError(
                f"{num_blocks} blocks were requested for {owner!r}, but only {self._num_free} of "
                f"{self.num_blocks} are free (held by {self._largest() or 'nobody'}): free some, or make a "
                "larger pool",
                code="exhausted",
            )
        ids = np.flatnonzero(self._owner == _FREE)[:num_blocks].astype(np.uint32)
        if num_blocks:
            index = self._names.get(owner)
            if index is None:
                index = next(i for i in range(len(self._held) + 1) if i not in self._held)
                self._names[owner] = index
            self._owner[ids] = index
            self._held[index] = self._held.get(index, 0) + num_blocks
            self._num_free -= num_blocks
        return ids

    def free(self, blocks: BlockTable | NDArray[np.uint32] | Iterable[int]) -> None:
        """Takes blocks back from any owner. All or nothing.

        Raises
        ------
        UsageError
            ``out-of-range``, ``duplicate-block``, or ``invalid-argument`` for a block that is free already
            (after a double free, two requests could write to one block).
        """
        table = BlockTable(blocks)
        table.require_within(self.num_blocks)
        table.require_distinct()
        ids = as_ids(table)
        owners = self._owner[ids]
        if (owners == _FREE).any():
            raise invalid(f"block {ids[owners == _FREE][0]} was freed twice")
        self._owner[ids] = _FREE
        self._num_free += len(ids)
        for index, count in zip(*np.unique(owners, return_counts=True), strict=True):
            self._held[int(index)] -= int(count)
            if not self._held[int(index)]:
                del self._held[int(index)]
                self._names = {name: i for name, i in self._names.items() if i != index}

    def free_owner(self, owner: str) -> int:
        """Takes back every block of `owner`; returns how many there were."""
        index = self._names.get(owner)
        if index is None:
            return 0
        ids = np.flatnonzero(self._owner == index)
        self.free(ids)
        return len(ids)

    def owners(self) -> dict[str, list[int]]:
        """Returns the allocated blocks, by owner."""
        return {
            name: np.flatnonzero(self._owner == index).tolist() for name, index in sorted(self._names.items())
        }

    def _largest(self) -> str:
        held = sorted(((self._held[i], name) for name, i in self._names.items()), reverse=True)
        return ", ".join(f"{name} {count}" for count, name in held[:4]) + (", ..." if len(held) > 4 else "")
