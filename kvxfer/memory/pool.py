"""Pools: memory that kvxfer owns, that peers on the host can map, and from which blocks are allocated."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvxfer._native import NativeError, PoolMemory
from kvxfer.arguments import count
from kvxfer.errors import ExhaustedError, invalid, translate
from kvxfer.memory.block_table import BlockTable
from kvxfer.memory.free_list import BlockFreeList

# Arrays begin at cache lines, so that non-temporal stores to one array never touch another.
_ALIGNMENT_NBYTES = 64
# Every machine has this much, and reading the limits takes 0.1 ms.
_ASKED_ABOUT_NBYTES = 64 * 1024 * 1024
# Block ids have 32 bits, sizes of memory 63.
_MOST_BLOCKS = 2**32
_MOST_NBYTES = 2**63 - 1
_MOST_NODES = 2**31 - 1


class Pool:
    """Shareable memory with guard pages around it, which is cut into arrays and allocated in blocks.

    Transfers of regions in a pool are the fastest on one host, because a peer maps the memory once,
    read-only. The pool uses huge pages if the kernel has them. The memory lives as long as the pool or any
    array of it. All methods may be called from any thread.

    Parameters
    ----------
    num_blocks
        Number of blocks that `allocate` hands out: the ``b`` of the layouts of its arrays.
    block_nbytes
        Bytes of one block in all layers (`KVLayout.block_nbytes`); the memory is ``num_blocks`` of them,
        rounded up to pages. The layouts of the arrays decide where the bytes of a block lie.
    name
        Name in ``/proc/*/maps`` and in messages.
    huge_pages
        Whether to ask for huge pages.
    numa_node
        NUMA node for the memory; None lets the kernel choose. See `kvxfer.memory.topology`.

    Raises
    ------
    UsageError
        Fewer than one block, or fewer than one byte a block.
    ExhaustedError
        The pool is larger than the machine's memory, or than the limit of this process's control group. The
        kernel would kill this process, or another one, when the pool is filled. It may still do so if other
        processes use the memory that this pool needs.
    AgentError
        The system refuses the memory; the message has the system call and errno.
    """

    def __init__(
        self,
        num_blocks: int,
        block_nbytes: int,
        *,
        name: str = "kvxfer",
        huge_pages: bool = True,
        numa_node: int | None = None,
    ) -> None:
        num_blocks = count(num_blocks, "num_blocks", 1, _MOST_BLOCKS)
        block_nbytes = count(block_nbytes, "block_nbytes", 1, _MOST_NBYTES // num_blocks)
        if numa_node is not None:
            numa_node = count(numa_node, "numa_node", 0, _MOST_NODES)
        if num_blocks * block_nbytes >= _ASKED_ABOUT_NBYTES:
            _check_room(name, num_blocks * block_nbytes, huge_pages)
        self._blocks = BlockFreeList(num_blocks)
        try:
            self._memory = PoolMemory(
                num_blocks * block_nbytes, name, huge_pages, -1 if numa_node is None else numa_node
            )
        except NativeError as error:
            raise translate(error) from None
        self._name = name
        self._bytes: NDArray[np.uint8] | None = self._memory.array()
        self._used_nbytes = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Pool {self._name!r} nbytes={self.nbytes} free_blocks={self.num_free}/{self.num_blocks}>"

    # ---- memory -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name with which it was made."""
        return self._name

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, cut into arrays or not."""
        return self._memory.nbytes

    @property
    def page_kind(self) -> Literal["hugetlb", "transparent-huge", "base"]:
        """The kind of pages that the kernel gave."""
        return self._memory.page_kind

    @property
    def seals(self) -> tuple[str, ...]:
        """Operations that the kernel refuses from now on, e.g. ``("grow", "shrink", "future-write")``."""
        return self._memory.seals

    def array(self, shape: int | tuple[int, ...] | None = None, dtype: DTypeLike = np.uint8) -> NDArray[Any]:
        """Returns the next bytes as an array of zeros, C-contiguous, aligned to a cache line.

        If numpy lacks the type, use one of the same size (``uint16`` for bfloat16) and name the real type in
        the layout. Arrays cannot be given back; close the pool instead.

        Parameters
        ----------
        shape
            Shape of the array; None for one dimension with all bytes that are left.
        dtype
            Type of its elements.

        Raises
        ------
        ExhaustedError
            The pool does not have that many bytes left.
        UsageError
            The pool is closed.
        """
        kind = np.dtype(dtype)
        with self._lock:
            if self._bytes is None:
                raise invalid(f"pool {self._name!r} is closed")
            start = -(-self._used_nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
            left = max(len(self._bytes) - start, 0)
            if shape is None:
                shape = (left // kind.itemsize,)
            elif isinstance(shape, int):
                shape = (shape,)
            nbytes = math.prod(shape) * kind.itemsize
            if nbytes > left:
                raise ExhaustedError(
                    f"an array of {nbytes} bytes (shape {shape}, {kind.name}) does not fit in the {left} "
                    f"bytes left of pool {self._name!r}: make the pool large enough for all blocks of all "
                    "arrays",
                    code="exhausted",
                )
            part = self._bytes[start : start + nbytes]
            self._used_nbytes = start + nbytes
        return part.view(kind).reshape(shape)

    # ---- blocks -----------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Number of blocks with which it was made."""
        return self._blocks.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now."""
        return self._blocks.num_free

    @property
    def owners(self) -> dict[str, list[int]]:
        """Allocated blocks, by owner."""
        with self._lock:
            return self._blocks.owners()

    def allocate(self, num_blocks: int, owner: str = "unnamed") -> BlockTable:
        """Allocates blocks for `owner`, ascending and adjacent where possible; all or none.

        Raises
        ------
        ExhaustedError
            Not enough blocks are free; the message names the owners of the others.
        UsageError
            `num_blocks` is negative.
        """
        num_blocks = count(num_blocks, "num_blocks", 0, _MOST_BLOCKS)
        with self._lock:
            return BlockTable(self._blocks.allocate(num_blocks, owner))

    def free(self, blocks: BlockTable | NDArray[Any] | Iterable[int]) -> None:
        """Takes blocks back, all or none.

        Call it only when no transfer uses the blocks: after the transfer's end, or a lease's ``revoke``.

        Raises
        ------
        UsageError
            An id that is out of range, repeated, or free already.
        """
        with self._lock:
            self._blocks.free(blocks)

    def free_owner(self, owner: str) -> int:
        """Takes back every block of `owner`, e.g. an aborted request; returns how many."""
        with self._lock:
            return self._blocks.free_owner(owner)

    # ---- lifetime ---------------------------------------------------------------------------

    def close(self) -> dict[str, list[int]]:
        """Ends the pool and returns the blocks that were never given back, by owner.

        Warns with `ResourceWarning` if there are any. The memory itself stays until its last array,
        registered or not, is gone. Idempotent.
        """
        with self._lock:
            if self._bytes is None:
                return {}
            self._bytes = None
            leaks = self._blocks.owners()
        if leaks:
            count = sum(len(ids) for ids in leaks.values())
            named = ", ".join(f"{owner} ({len(ids)})" for owner, ids in list(leaks.items())[:8])
            warnings.warn(
                f"pool {self._name!r} was closed with {count} blocks still allocated, by: {named}",
                ResourceWarning,
                stacklevel=2,
            )
        return leaks

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_room(name: str, nbytes: int, huge_pages: bool) -> None:
    """Refuses a size that can never be filled."""
    from kvxfer.memory.control_group import free_huge_nbytes, machine_nbytes, memory_limit_nbytes

    # Reserved huge pages are certainly available, and control groups do not count them as memory.
    if huge_pages and nbytes <= free_huge_nbytes():
        return
    machine = machine_nbytes()
    swap = machine.get("SwapTotal", 0)
    bounds = []
    if "MemTotal" in machine:
        bounds.append((machine["MemTotal"] + swap, "this machine has"))
    if (limit := memory_limit_nbytes()) is not None:
        bounds.append((limit[0] + swap, f"the control group of this process allows ({limit[1]})"))
    for most, whose in bounds:
        if nbytes > most:
            raise ExhaustedError(
                f"pool {name!r} of {nbytes} bytes does not fit in the {most} bytes that {whose}: make it "
                "with fewer blocks, or raise that limit",
                code="exhausted",
            )
