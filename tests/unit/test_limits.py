"""The plain limits move exactly the pages that they are given."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.bench import _limits
from tests.seeds import seed_of

NUM_PAGES = 40
# Neither a multiple of a vector nor of a cache line, so that heads and tails are covered.
ODD_NBYTES = 4096 + 37
GUARD = 0xEE

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.uint64]


def shuffled_offsets(which: str, nbytes: int) -> Offsets:
    """A random order of NUM_PAGES pages, one byte apart and not aligned."""
    order = np.random.default_rng(seed_of(which)).permutation(NUM_PAGES)
    return (order * (nbytes + 1) + 3).astype(np.uint64)


def memory(nbytes: int) -> Bytes:
    return np.full(NUM_PAGES * (nbytes + 1) + 8, GUARD, np.uint8)


def random_memory(nbytes: int) -> Bytes:
    size = memory(nbytes).size
    return np.random.default_rng(seed_of("memory")).integers(0, 256, size, np.uint8)


def expected(src: Bytes, src_offsets: Offsets, dst_offsets: Offsets, nbytes: int) -> Bytes:
    out = memory(nbytes)
    for at_src, at_dst in zip(src_offsets.tolist(), dst_offsets.tolist(), strict=True):
        out[at_dst : at_dst + nbytes] = src[at_src : at_src + nbytes]
    return out


@pytest.mark.parametrize(
    "copy",
    [_limits.copy_pages, _limits.copy_pages_nt, partial(_limits.copy_pages_nt, threads=3)],
    ids=["plain", "nt", "threads"],
)
@pytest.mark.parametrize("nbytes", [1, 31, 64, 300, 4096, ODD_NBYTES])
def test_copies_move_the_named_pages_and_nothing_else(copy: Callable[..., int], nbytes: int) -> None:
    src, dst = random_memory(nbytes), memory(nbytes)
    src_offsets, dst_offsets = shuffled_offsets("src", nbytes), shuffled_offsets("dst", nbytes)
    elapsed_ns = copy(dst.ctypes.data, src.ctypes.data, dst_offsets, src_offsets, nbytes)
    assert elapsed_ns > 0
    np.testing.assert_array_equal(dst, expected(src, src_offsets, dst_offsets, nbytes))


def test_nt_kernel_is_named() -> None:
    assert _limits.NT_KERNEL in ("avx512-nt", "avx2-nt", "memcpy")


# A child that holds pages and prints their address: a process may read a child, but perhaps not a parent or a
# sibling.
CHILD = """
import sys, numpy as np
pages = np.random.default_rng(int(sys.argv[2])).integers(0, 256, int(sys.argv[1]), np.uint8)
print(pages.ctypes.data, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("batch", [1, 7, 1024])
def test_vm_readv_reads_the_pages_of_another_process(batch: int) -> None:
    src, dst = random_memory(ODD_NBYTES), memory(ODD_NBYTES)
    src_offsets, dst_offsets = shuffled_offsets("src", ODD_NBYTES), shuffled_offsets("dst", ODD_NBYTES)
    command = [sys.executable, "-c", CHILD, str(src.size), str(seed_of("memory"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = int(child.stdout.readline())
        try:
            _limits.vm_readv_pages(
                child.pid, dst.ctypes.data, address, dst_offsets, src_offsets, ODD_NBYTES, batch
            )
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS):
                pytest.skip(f"this machine does not allow process_vm_readv: {error}")
            raise
    np.testing.assert_array_equal(dst, expected(src, src_offsets, dst_offsets, ODD_NBYTES))


def test_vm_readv_of_unmapped_memory_raises_os_error() -> None:
    dst, offsets = memory(4096), shuffled_offsets("src", 4096)
    with pytest.raises(OSError, match="process_vm_readv"):
        _limits.vm_readv_pages(os.getpid(), dst.ctypes.data, 8, offsets, offsets, 4096)


@pytest.mark.parametrize("batch", [1, 7, 1024])
@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_stream_survives_partial_calls(family: str, batch: int) -> None:
    src, dst = random_memory(ODD_NBYTES), memory(ODD_NBYTES)
    src_offsets, dst_offsets = shuffled_offsets("src", ODD_NBYTES), shuffled_offsets("dst", ODD_NBYTES)
    left, right = socket_pair(family)
    with left, right:
        # Small buffers: nearly every call moves a part of a page. Much smaller ones would have tcp
        # wait for its delayed acknowledgements.
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        right.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sender = threading.Thread(
            target=_limits.send_pages,
            args=(left.fileno(), src.ctypes.data, src_offsets, ODD_NBYTES, batch),
        )
        sender.start()
        _limits.recv_pages(right.fileno(), dst.ctypes.data, dst_offsets, ODD_NBYTES, batch)
        sender.join()
    np.testing.assert_array_equal(dst, expected(src, src_offsets, dst_offsets, ODD_NBYTES))


def socket_pair(family: str) -> tuple[socket.socket, socket.socket]:
    if family == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def test_end_of_stream_raises_connection_error() -> None:
    dst, offsets = memory(4096), shuffled_offsets("src", 4096)
    left, right = socket.socketpair()
    with right:
        left.sendall(b"x" * 5000)
        left.close()
        with pytest.raises(ConnectionError, match="readv"):
            _limits.recv_pages(right.fileno(), dst.ctypes.data, offsets, 4096)


def test_closed_reader_raises_broken_pipe() -> None:
    src, offsets = memory(4096), shuffled_offsets("src", 4096)
    left, right = socket.socketpair()
    right.close()
    with left, pytest.raises(BrokenPipeError):
        _limits.send_pages(left.fileno(), src.ctypes.data, offsets, 4096)


def test_unequal_tables_bad_sizes_and_other_dtypes_are_refused() -> None:
    dst, offsets = memory(64), shuffled_offsets("src", 64)
    address = dst.ctypes.data
    with pytest.raises(ValueError, match="differ in length"):
        _limits.copy_pages(address, address, offsets, offsets[:-1], 64)
    with pytest.raises(ValueError, match="positive"):
        _limits.copy_pages(address, address, offsets, offsets, 0)
    with pytest.raises(ValueError, match="batch"):
        _limits.send_pages(0, address, offsets, 64, 1025)
    with pytest.raises(TypeError):
        _limits.copy_pages(address, address, offsets.astype(np.int64), offsets, 64)


def test_no_pages_take_no_call() -> None:
    none = np.empty(0, np.uint64)
    assert _limits.send_pages(-1, 0, none, 64) >= 0
    assert _limits.copy_pages(0, 0, none, none, 64) >= 0


@pytest.fixture
def eventfds() -> Iterator[tuple[int, int]]:
    descriptors = os.eventfd(0), os.eventfd(0)
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


# The other end, in its own process.
WAKER = """
import sys
from kvxfer.bench import _limits
from tests.seeds import seed_of
in_fd, out_fd, count = map(int, sys.argv[1:])
assert len(_limits.wake_ups(in_fd, out_fd, False, count, 20.0)) == count
"""


def test_two_processes_wake_each_other_in_turns(eventfds: tuple[int, int]) -> None:
    command = [sys.executable, "-c", WAKER, *map(str, eventfds[::-1]), "20"]
    with subprocess.Popen(command, pass_fds=eventfds) as other:
        wakes_ns = _limits.wake_ups(*eventfds, True, 20, 20.0)
    assert other.returncode == 0
    assert len(wakes_ns) == 20
    assert min(wakes_ns) > 0


@pytest.mark.parametrize("first", [False, True])
def test_an_end_that_nobody_wakes_gives_up(eventfds: tuple[int, int], first: bool) -> None:
    with pytest.raises(TimeoutError):
        _limits.wake_ups(*eventfds, first, 1, 0.01)


def test_a_wake_up_without_an_eventfd_raises_os_error() -> None:
    with pytest.raises(OSError, match="eventfd") as raised:
        _limits.wake_ups(-1, -1, True, 1, 10.0)
    assert raised.value.errno == errno.EBADF
