"""The plain limits that benchmark ratios are taken against.

The same pages, moved by the shortest code that can move them; nothing of the engine is shared.
Page ``i`` starts at ``addr + offsets[i]`` and has ``nbytes`` bytes. Addresses are trusted: the
caller keeps the memory alive. Offsets are uint64 [num_pages], C-contiguous, never converted.
Each call releases the GIL, finishes what a system call leaves undone, and returns the elapsed
nanoseconds (CLOCK_MONOTONIC). A failing system call raises ``OSError`` with its name.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

#: "avx512-nt", "avx2-nt" or "memcpy": what ``copy_pages_nt`` uses on this machine.
NT_KERNEL: Final[str]

def copy_pages(
    dst_addr: int, src_addr: int, dst_offsets: NDArray[np.uint64], src_offsets: NDArray[np.uint64], nbytes: int
) -> int:
    """memcpy, page by page."""

def copy_pages_nt(
    dst_addr: int,
    src_addr: int,
    dst_offsets: NDArray[np.uint64],
    src_offsets: NDArray[np.uint64],
    nbytes: int,
    threads: int = 1,
) -> int:
    """Non-temporal stores, page by page; a store fence at the end. Each of the threads copies a run of pages."""

def vm_readv_pages(
    pid: int,
    dst_addr: int,
    src_addr: int,
    dst_offsets: NDArray[np.uint64],
    src_offsets: NDArray[np.uint64],
    nbytes: int,
    batch: int = 1024,
) -> int:
    """process_vm_readv of ``batch`` pages a call; ``src_addr`` is in process ``pid``."""

def send_pages(fd: int, addr: int, offsets: NDArray[np.uint64], nbytes: int, batch: int = 1024) -> int:
    """writev of ``batch`` pages a call to a blocking descriptor."""

def recv_pages(fd: int, addr: int, offsets: NDArray[np.uint64], nbytes: int, batch: int = 1024) -> int:
    """readv of ``batch`` pages a call from a blocking descriptor; ``ConnectionError`` at its end."""

#: Bytes of what goes before a piece: its offset at the destination and its length.
PIECE_HEADER_NBYTES: Final[int]

def send_pieces(
    fd: int, addresses: NDArray[np.uint64], dst_offsets: NDArray[np.uint64], nbytes: NDArray[np.uint64]
) -> int:
    """One message for each piece: a writev of its header and of ``nbytes[i]`` bytes at ``addresses[i]``."""

def recv_pieces(fd: int, dst_addr: int, dst_nbytes: int, total: int) -> int:
    """Reads each header, then its piece into place, until ``total`` bytes of both are in.

    ``OSError`` (EBADMSG) for a piece that would lie beyond ``dst_nbytes``.
    """

def wake_ups(in_fd: int, out_fd: int, first: bool, count: int, timeout_s: float) -> list[int]:
    """Takes turns with another process over two blocking eventfds; returns the ``count`` wake-ups of this end.

    Each is the nanoseconds from before the other end's write of ``in_fd`` to after the read here that
    slept for it; each write comes after an idle while. The end that is ``first`` writes first.
    ``TimeoutError`` when all of it takes longer than ``timeout_s``.
    """

def relay(
    done: int, word: int, said: int, reply: int, num_words: int, num_rounds: int, timeout_s: float
) -> int:
    """The host's part of the litmus test (native/gpu/litmus.cu), over addresses of pinned memory.

    Returns how many words were not as the device had said. ``TimeoutError`` where the device does not come to
    the end in time; every stream that waits for ``word`` has been let go then.
    """
