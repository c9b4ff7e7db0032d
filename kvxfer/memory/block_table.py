"""A request's list of physical page ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import UsageError, invalid

_MAX_ID = 0xFFFF_FFFF
# A GiB of ids. No region has so many blocks.
_MOST_OF_RANGE = 1 << 28
_UINT32 = np.dtype(np.uint32)


class BlockTable:
    """Block ids of a region, in the order of the request's tokens, as uint32.

    An array that is already one-dimensional, contiguous uint32 is not copied; do not change it while a call
    uses it. Making one from numpy runs no Python loop.

    Parameters
    ----------
    blocks
        A list, numpy array of any integer type, range, iterable of ints, or another table.

    Raises
    ------
    UsageError
        ``invalid-argument`` for anything but a flat list of integers, ``out-of-range`` for ids that are
        negative or do not fit in 32 bits.
    """

    __slots__ = ("_ids",)

    def __init__(self, blocks: BlockTable | NDArray[Any] | Iterable[int]) -> None:
        self._ids = as_ids(blocks)

    @property
    def ids(self) -> NDArray[np.uint32]:
        """The ids [num_blocks], C-contiguous."""
        return self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if dtype is not None and np.dtype(dtype) != self._ids.dtype:
            return self._ids.astype(dtype)
        return self._ids.copy() if copy else self._ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockTable) and np.array_equal(self._ids, other._ids)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(str(i) for i in self._ids[:8])
        return f"BlockTable([{shown}{', ...' if len(self) > 8 else ''}], num_blocks={len(self)})"

    def duplicates(self) -> NDArray[np.uint32]:
        """Returns the ids that occur more than once, ascending. O(n log n)."""
        ids, counts = np.unique(self._ids, return_counts=True)
        return ids[counts > 1]

    def require_distinct(self) -> None:
        """Raises ``UsageError("duplicate-block")`` if an id occurs twice, which destinations do not allow."""
        twice = self.duplicates()
        if len(twice):
            raise UsageError(
                f"block {twice[0]} is named more than once ({len(twice)} ids are): a destination block can "
                "receive only one source block",
                code="duplicate-block",
            )

    def require_within(self, num_blocks: int) -> None:
        """Raises ``UsageError("out-of-range")`` when an id is not below `num_blocks`."""
        if len(self._ids) and (largest := int(self._ids.max())) >= num_blocks:
            raise UsageError(
                f"block {largest} is outside a region of {num_blocks} blocks (0 to {num_blocks - 1})",
                code="out-of-range",
            )


def as_ids(blocks: BlockTable | NDArray[Any] | Iterable[int]) -> NDArray[np.uint32]:
    """Returns block ids as contiguous uint32 [num_blocks], checked as by `BlockTable`, without making one."""
    if isinstance(blocks, np.ndarray):
        # numpy has only one object of this dtype, and comparing dtypes by value takes ten times as long.
        if blocks.dtype is _UINT32 and blocks.ndim == 1 and blocks.flags.c_contiguous:
            return blocks
        array = blocks
    elif isinstance(blocks, BlockTable):
        return blocks._ids
    elif isinstance(blocks, range):
        # Checked by its ends before it is expanded: a range takes no memory, however many ids it names.
        if blocks:
            _require_ids(min(blocks[0], blocks[-1]), max(blocks[0], blocks[-1]))
            if len(blocks) > _MOST_OF_RANGE:
                raise invalid(
                    f"a range names {len(blocks)} blocks, but a block table at most {_MOST_OF_RANGE}"
                )
        array = np.arange(blocks.start, blocks.stop, blocks.step, dtype=np.int64)
    else:
        array = _from_iterable(blocks)
    if array.ndim != 1:
        raise invalid(
            f"a block table must have one dimension, but this array has {array.ndim} (shape {array.shape}): "
            "pass the ids of one request and one cache group"
        )
    if array.dtype.kind not in "iu":
        if array.size == 0:
            return np.empty(0, np.uint32)
        raise invalid(f"block ids must be integers, not {array.dtype.name}")
    if array.size:
        _require_ids(int(array.min()), int(array.max()))
    return np.ascontiguousarray(array, dtype=np.uint32)


def _require_ids(low: int, high: int) -> None:
    if low < 0 or high > _MAX_ID:
        raise UsageError(
            f"block id {low if low < 0 else high} is not in 0 to {_MAX_ID}: cut off padding entries "
            "(-1) first",
            code="out-of-range",
        )


def _from_iterable(blocks: Iterable[int]) -> NDArray[Any]:
    if isinstance(blocks, (str, bytes)):
        raise invalid(f"block ids must be integers, not {type(blocks).__name__}")
    try:
        items = blocks if isinstance(blocks, (list, tuple)) else list(blocks)
        return np.asarray(items)
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid(f"these are not block ids: {error}") from error
