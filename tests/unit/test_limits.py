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
