"""A process runs out of something: descriptors, addresses, threads, memory, /dev/shm.

Its requests are then refused with a clear message, its sessions continue, and it works as before once there
is enough.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvxfer import Pool
from kvxfer.errors import AgentError, ExhaustedError, PeerError, TransferError
from kvxfer.memory.control_group import machine_nbytes
from tests.fault import confinement
from tests.fault.node import BOUND_S, ROOT, SMALL, Local, Node, Remote, Worker, join, moves_both_ways
from tests.fault.test_process_faults import works_with
from tests.waiting import until

# 72 MiB: more than a container's /dev/shm.
LARGER: tuple[int, ...] = (9, *SMALL[1:3], 32, 8, 128)


def run(program: str, *within: str) -> None:
    """Runs a program; if it fails, shows its output."""
    done = subprocess.run(
        [*within, sys.executable, "-c", program],
        cwd=ROOT,
        timeout=2 * BOUND_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- descriptors --------------------------------------------------------------------------------


RAILS = {
    "shm": ("shm", "unix"),
    "tcp": ("tcp", "tcp"),
    "ucx": ("tcp", "ucx"),
    "libfabric": ("tcp", "libfabric"),
    "libfabric-written": ("tcp", "libfabric"),
}


@pytest.fixture
def pair(transport: str, local: Local, remote: Remote) -> tuple[Node, Worker]:
    """A node here and one in another process, with all rails up, because a new rail needs descriptors."""
    here, there = local("here", transport), remote("full", transport)
    join(here, there)
    for end in (here, there):
        end.wait_rails(*RAILS[transport])
    return here, there


def test_without_descriptors_sessions_go_on_and_others_are_told(
    transport: str, pair: tuple[Node, Worker], local: Local
) -> None:
    here, there = pair
    newcomer = local("newcomer", transport)
    there.do(confinement.spare_descriptors, 0)
    with pytest.raises(PeerError) as caught:
        newcomer.connect(there.address())
    assert caught.value.code in {"peer-lost", "no-answer"}, caught.value
    with pytest.raises(PeerError, match=r"Too many open files: this process has (\d+) of \1 descriptors"):
        there.connect(newcomer.address())
    with pytest.raises(AgentError, match="Too many open files") as refused:
        there.do(confinement.make, 4096)
    assert refused.value.code == "system"
    moves_both_ways(here, there, 1)
    there.do(confinement.enough_descriptors)
    moves_both_ways(here, there, 3)
    works_with(newcomer, there, 5)


def test_callers_of_an_agent_without_descriptors_do_not_keep_it_busy(pair: tuple[Node, Worker]) -> None:
    """Each time that the agent accepts, it refuses one of them, and it accepts less and less often."""
    here, there = pair
    host, _, port = there.address().removeprefix("tcp://").rpartition(":")
    there.do(confinement.spare_descriptors, 0)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        callers = [
            stack.enter_context(socket.create_connection((host, int(port)), BOUND_S)) for _ in range(100)
        ]
        callers[0].recv(1)  # it has looked
        for seed in range(5):
            moves_both_ways(here, there, 2 * seed)
        turned_away = 0
        for caller in callers:
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                turned_away += caller.recv(1) == b""
        # After 10 ms, 20 ms and so on, and then after each second.
        assert turned_away <= 10 + (time.monotonic() - begun)
    there.do(confinement.enough_descriptors)
    here.disconnect()
    there.wait_lost()
    works_with(here, there, 5)


@pytest.mark.parametrize("spare", [0, 1])
def test_the_users_secret_is_not_blamed_where_no_descriptor_is_left(spare: int) -> None:
    run(f"""
from kvxfer.errors import AgentError
from kvxfer.session.user_secret import user_secret
from tests.fault import confinement
user_secret()
confinement.spare_descriptors({spare})
try:
    user_secret()
except AgentError as error:
    assert error.code == "system" and "Too many open files" in str(error), error
else:
    raise AssertionError("it was read")
""")


def test_a_process_without_descriptors_waits_and_closes_as_ever() -> None:
    """The first wait and the first close, before their descriptors and imports exist."""
    run("""
import threading
import numpy as np
from kvxfer import Agent, AgentError, Group
from tests.fault.confinement import enough_descriptors, spare_descriptors

def wait():
    try:
        a.notification_blocking()
    except AgentError as error:
        ended.append(error.code)

a, b, ended = Agent("a"), Agent("b"), []
for agent in (a, b):
    agent.register("kv", np.zeros((4, 64), np.uint8))
incoming = [agent.expect(b"tag", [0]) for agent in (a, b)]
spare_descriptors(0)
for wait_in_vain in (lambda: a.accept_blocking("nobody", 0.1), lambda: Group(incoming).wait(0.1)):
    try:
        wait_in_vain()
    except TimeoutError:
        continue
    raise AssertionError("nothing can have come")
thread = threading.Thread(target=wait, daemon=True)
thread.start()
a.close()
thread.join(30)
assert ended == ["closed"], ended
enough_descriptors()
with Agent("c") as c:
    c.connect_blocking(b.address)
""")


# ---- addresses, threads -------------------------------------------------------------------------


def test_what_finds_no_addresses_is_refused_and_sessions_go_on(
    transport: str, local: Local, remote: Remote
) -> None:
    here, there = local("here", transport), remote("narrow", transport)
    join(here, there)
    there.fill(1)
    here.fill(2)
    there.do(confinement.spare_addresses, 4 << 20)
    with pytest.raises(AgentError, match="Cannot allocate memory") as caught:
        there.do(confinement.make, 64 << 20)
    assert caught.value.code == "system"
    # A thread's stack is larger.
    with pytest.raises(AgentError, match="no thread can be started for agent 'another'") as caught:
        there.do(confinement.make, 4096)
    assert caught.value.code == "system"
    there.grant("read", here.all[::2])
    there.grant("write", here.all[1::2])
    here.read(here.all[::2])
    here.write(here.all[1::2])
    assert here.end(0) is None
    assert here.end(1) is None
    there.do(confinement.spare_addresses, -1)
    assert here.holds(1, here.all[::2])
    assert there.holds(2, here.all[1::2])
    there.do(confinement.make, 64 << 20)
    works_with(local("second", transport), there, 5)


# ---- memory -------------------------------------------------------------------------------------


def test_a_pool_larger_than_the_machine_is_refused() -> None:
    """Filling it would make the kernel kill processes until it fits."""
    with pytest.raises(ExhaustedError, match="does not fit in the ") as caught:
        Pool(1 << 20, 1 << 30, name="kv")
    assert caught.value.code == "exhausted"
    assert "pool 'kv' of 1125899906842624 bytes" in str(caught.value)


@pytest.fixture
def control_group() -> Iterator[Callable[[int], Path]]:
    """Makes control groups with a memory limit; their processes end before the group does."""
    made: list[Path] = []

    def make(nbytes: int) -> Path:
        root = Path("/sys/fs/cgroup")
        # Version 1, where the second limit covers memory and swap, or version 2. Nothing may be swapped.
        parent, limits = (
            root / "memory",
            {"memory.limit_in_bytes": nbytes, "memory.memsw.limit_in_bytes": nbytes},
        )
        if not parent.is_dir():
            parent, limits = root, {"memory.max": nbytes, "memory.swap.max": 0}
        group = parent / f"kvxfer-test-{os.getpid()}"
        try:
            group.mkdir()
            made.append(group)
            for name, value in limits.items():
                (group / name).write_text(str(value))
        except OSError as error:
            pytest.skip(f"no control group for memory can be made: {error}")
        return group

    yield make
    for group in made:
        until(partial(_is_removed, group), group)


def _is_removed(group: Path) -> bool:
    """Removes a control group; a process that was waited for leaves it a moment later."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def test_a_control_group_that_is_full_ends_its_process_and_nothing_else(
    transport: str, local: Local, remote: Remote, control_group: Callable[[int], Path]
) -> None:
    """The kernel kills the process that exceeds the limit; its peers learn of it, and continue."""
    here, other, there = local("here", transport), remote("other", transport), remote("full", transport)
    join(here, other)
    join(here, there)
    there.grant("write")
    write = here.write(hold=True)
    lease = here.grant("read")
    (control_group(256 << 20) / "cgroup.procs").write_text(str(there.process.pid))
    # What would never fit is refused.
    with pytest.raises(ExhaustedError, match="control group of this process allows"):
        there.do(confinement.make, machine_nbytes()["SwapTotal"] + (512 << 20))
    # What the process had before is counted on the group that it had then, and what one pool takes is gone.
    with pytest.raises((EOFError, ConnectionError)):
        there.do(confinement.make, 160 << 20, 160 << 20)
    assert there.process.wait(BOUND_S) == -signal.SIGKILL
    error = here.end(write)
    assert isinstance(error, PeerError | TransferError), error
    assert error.code == "peer-lost"
    assert here.wait_lease(lease) == "peer-lost"
    here.peers.pop()
    moves_both_ways(here, other, 1)


def test_pools_need_no_shared_memory_folder(local: Local, remote: Remote) -> None:
    """A container's /dev/shm has 64 MiB, which are all used here; the pool is larger."""
    script = (
        "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
        "! dd if=/dev/zero of=/dev/shm/taken bs=1M count=65 2>/dev/null && "
        'exec "$@"'
    )
    within = ("unshare", "-m", "sh", "-c", script, "sh")
    if reason := confinement.why_not(*within):
        pytest.skip(reason)
    there = remote("contained", "shm", LARGER, within=within)
    here = local("here", "shm", LARGER)
    join(here, there)
    here.wait_rails("shm", "unix")
    moves_both_ways(here, there, 1)
    assert there.do(os.statvfs, "/dev/shm").f_bavail == 0
