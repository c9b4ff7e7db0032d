"""Blocks that stay at decode after their request, for those that begin alike. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvxfer.bench.work.page_data import Indices, Words


class PrefixCache:
    """Blocks by their content, the least recently used first to go.

    A content names the block's tokens and all before them (as the trace's hash ids do), so an equal
    content is an equal block. Blocks in use by a request are never given away.

    Parameters
    ----------
    capacity_blocks
        Blocks that are kept while no request uses them.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._users: Counter[int] = Counter()

    def take(self, contents: Words) -> list[int]:
        """Returns the blocks of the longest beginning that is here, and holds them until `give_back`."""
        taken = []
        for content in contents.tolist():
            if content not in self._blocks:
                break
            self._users[content] += 1
            taken.append(self._blocks[content])
        return taken

    def give_back(self, contents: Words, blocks: Indices, num_taken: int) -> list[int]:
        """Takes a request's blocks at its end: ``num_taken`` of them were ours, the others are new.

        Returns the blocks that are free now: those of other requests that had to go, and new ones
        whose content another request brought first.
        """
        for content in contents[:num_taken].tolist():
            self._users[content] -= 1
            if not self._users[content]:
                del self._users[content]
        freed = []
        # From the end: a beginning outlives what follows it, which is of no use without it.
        for content, block in zip(contents[::-1].tolist(), blocks[::-1].tolist(), strict=True):
            if self._blocks.setdefault(content, block) != block:
                freed.append(block)
            self._blocks.move_to_end(content)
        for content in list(self._blocks):
            if len(self._blocks) - len(self._users) <= self._capacity:
                break
            if content not in self._users:
                freed.append(self._blocks.pop(content))
        return freed
