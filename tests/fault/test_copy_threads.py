"""An agent with threads that copy or move rails of tcp: killed peers, cancelled work, close and fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import PeerError, TransferError
from tests.fault.node import LARGE, Local, Node, Remote, Worker

THREADS = 3
# Memory from which threads copy, and rails that they move.
MEMORY = pytest.mark.parametrize("way", ["pool", "foreign"])
WAYS = pytest.mark.parametrize("way", ["pool", "foreign", "tcp"])
RAILS = 4


def copy_threads() -> list[str]:
    """Names of this process's threads that copy."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if name.startswith("kvxfer-copy-"))


def pair(local: Local, remote: Remote, way: str) -> tuple[Node, Worker]:
    """A destination whose threads copy, and a source that serves it."""
    transport = "tcp" if way == "tcp" else "shm"
    options: dict[str, Any] = {"copy_threads": THREADS, "transport_options": {"tcp.rails": RAILS}}
    dst = local("threads", transport, LARGE, **options)
    src = remote("source", transport, LARGE, pooled=way != "foreign", **options)
    src.fill(1)
    src.connect(dst.address())
    dst.accept("source")
    dst.wait_rails(*(["tcp"] * RAILS if way == "tcp" else ["shm", "unix"]))
    src.grant("read")
    return dst, src


@MEMORY
def test_threads_copy_what_is_large_and_end_with_their_agent(local: Local, remote: Remote, way: str) -> None:
    dst, _ = pair(local, remote, way)
    assert copy_threads() == []
    dst.read(ids=[])
    assert dst.end() is None
    assert copy_threads() == []
    dst.read()
    assert dst.end() is None
    assert dst.holds(1)
    assert copy_threads() == [f"kvxfer-copy-{at}" for at in range(1, THREADS)]
    dst.close()
    assert copy_threads() == []


@WAYS
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_source_is_killed_while_threads_copy(local: Local, remote: Remote, way: str, held: bool) -> None:
    dst, src = pair(local, remote, way)
    read = dst.read_until_bytes_land(held=held)
    src.kill()
    error = dst.end(read)
    if error is None and not held:
        assert dst.holds(1)
    else:
        assert isinstance(error, PeerError | TransferError), error
    assert dst.wait_lost()
    dst.wait_idle()


@WAYS
def test_nothing_lands_after_a_cancel_returned(local: Local, remote: Remote, way: str) -> None:
    dst, _ = pair(local, remote, way)
    for round_ in range(20):
        dst.set(0)
        # A free read may have ended when it is cancelled.
        held = round_ % 2 == 1
        read = dst.read_until_bytes_land(held=held)
        dst.cancel(read)
        error = dst.end(read)
        assert (error is None and not held) or (error and error.code == "cancelled"), error
        dst.set(round_ + 2)
        assert dst.is_all(round_ + 2)
    assert dst.is_all(21)
    dst.read()
    assert dst.end() is None
    assert dst.holds(1)


@WAYS
def test_memory_is_the_callers_when_the_region_is_deregistered(
    local: Local, remote: Remote, way: str
) -> None:
    dst, _ = pair(local, remote, way)
    read = dst.read_until_bytes_land()
    dst.deregister()
    dst.set(7)
    dst.end(read)
    assert dst.is_all(7)


def test_agents_close_and_children_exit_while_threads_copy(local: Local, remote: Remote) -> None:
    src = local("source", "shm", LARGE)
    src.fill(1)
    dst = remote("threads", "shm", LARGE, copy_threads=THREADS)
    dst.connect(src.address())
    src.accept("threads")
    src.grant("read")
    dst.grant("read")  # which a child tries to revoke
    dst.remember_remote()
    dst.read_until_bytes_land()
    pid, outcomes = dst.fork()
    assert set(outcomes.values()) == {"AgentError forked"}, outcomes
    assert dst.reap(pid) == 0
    dst.end()
    dst.set(0)
    dst.read_until_bytes_land()
    dst.close()
    dst.set(7)
    assert dst.is_all(7)
    src.wait_idle()
