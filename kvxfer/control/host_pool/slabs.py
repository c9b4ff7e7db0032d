"""Slabs of the pool: the layout whose pages each slab holds, and its free blocks."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Slab:
    """A piece of the pool that holds pages of one layout.

    Attributes
    ----------
    layout
        The layout whose pages it holds; ``""`` if it never held one.
    num_busy
        How many of its pages may not be evicted.
    used_at
        When one of its pages was last used.
    free
        A heap of free blocks. Lowest first, so that adjacent blocks make long runs.
    """

    number: int
    layout: str = ""
    num_blocks: int = 0
    num_pages: int = 0
    num_busy: int = 0
    used_at: float = 0.0
    free: list[int] = field(default_factory=list)


class Slabs:
    """All slabs of a pool: of equal size, one behind the other.

    Pages of one layout lie on one grid over the whole pool, so pages of several slabs are blocks of one
    region. No slab uses a page of the grid that would reach over the slab's end.
    """

    def __init__(self, num_slabs: int, slab_nbytes: int) -> None:
        self.nbytes = slab_nbytes
        self._all = [Slab(number) for number in range(num_slabs)]
        self._with_room: dict[str, dict[int, Slab]] = {}
        self._num_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Slab:
        return self._all[number]

    @property
    def layouts(self) -> Mapping[str, int]:
        """How many slabs each layout has; without layouts that have none. Read only."""
        return self._num_of

    def room(self, layout: str, page_nbytes: int) -> int:
        """Returns how many pages fit in free blocks, and in slabs of other layouts that may be evicted."""
        free = sum(len(slab.free) for slab in self._all if slab.layout == layout)
        others = (slab for slab in self._all if slab.layout != layout and not slab.num_busy)
        return free + sum(len(self._blocks(slab, page_nbytes)) for slab in others)

    def with_room(self, layout: str, page_nbytes: int) -> Slab | None:
        """Returns a slab of the layout that has a free block; takes an unused slab if there is none."""
        if slabs := self._with_room.get(layout):
            return next(iter(slabs.values()))
        for slab in self._all:
            if not slab.layout and self._blocks(slab, page_nbytes):
                self.format(slab, layout, page_nbytes)
                return slab
        return None

    def oldest_other(self, layout: str, page_nbytes: int) -> Slab | None:
        """Returns the slab of another layout to evict first: an empty one, or the least recently used one."""
        others = (
            slab
            for slab in self._all
            if slab.layout not in ("", layout) and not slab.num_busy and self._blocks(slab, page_nbytes)
        )
        return min(others, key=lambda slab: slab.used_at if slab.num_pages else -1.0, default=None)

    def format(self, slab: Slab, layout: str, page_nbytes: int) -> None:
        """Assigns a slab without pages to `layout`."""
        if slab.layout:
            self._with_room[slab.layout].pop(slab.number, None)
            self._num_of[slab.layout] -= 1
            if not self._num_of[slab.layout]:
                del self._num_of[slab.layout], self._with_room[slab.layout]
        slab.layout = layout
        slab.free = list(self._blocks(slab, page_nbytes))
        slab.num_blocks = len(slab.free)
        self._num_of[layout] = self._num_of.get(layout, 0) + 1
        self._with_room.setdefault(layout, {})[slab.number] = slab

    def take(self, slab: Slab, now: float) -> int:
        """Takes a free block for a page that may not be evicted yet."""
        block = heapq.heappop(slab.free)
        if not slab.free:
            del self._with_room[slab.layout][slab.number]
        slab.num_pages += 1
        slab.num_busy += 1
        slab.used_at = now
        return block

    def give_back(self, number: int, block: int, *, was_busy: bool) -> None:
        """Frees the block of a page."""
        slab = self._all[number]
        heapq.heappush(slab.free, block)
        self._with_room[slab.layout][number] = slab
        slab.num_pages -= 1
        slab.num_busy -= was_busy

    def _blocks(self, slab: Slab, page_nbytes: int) -> range:
        """Returns the pages of the grid that lie in the slab."""
        begin = slab.number * self.nbytes
        return range(-(-begin // page_nbytes), (begin + self.nbytes) // page_nbytes)
