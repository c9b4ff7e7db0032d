"""Forks, many rounds of connecting, and the pages around a pool."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest

from tests import fork_server
from tests.fault.node import BOUND_S, HASTY_S, Local, Node, Remote, Worker, footprint, until_within
from tests.waiting import until

# ---- fork -----------------------------------------------------------------------------------------


def pair(transport: str, local: Local, remote: Remote, **options: float) -> tuple[Node, Worker]:
    here, there = local("here", transport, **options), remote("forker", transport, **options)
    there.connect(here.address())
    here.accept("forker")
    there.remember_remote()
    there.fill(1)
    there.grant("read")
    here.grant("write")
    return here, there


def test_a_forked_child_can_do_nothing_and_disturbs_nothing(
    transport: str, local: Local, remote: Remote
) -> None:
    here, there = pair(transport, local, remote, silent_timeout_s=HASTY_S)
    write = there.write(hold=True)
    there.release(1)
    here.until_bytes_land()
    pid, outcomes = there.fork()
    assert len(outcomes) == 25
    assert set(outcomes.values()) == {"AgentError forked"}, outcomes
    assert there.reap(pid) == 0
    assert there.peer_state() == ("open", "")
    there.release(there_layers := here.num_layers, write)
    assert there_layers == 4
    assert there.end(write) is None
    assert here.holds(1)
    here.set(0)
    here.read()
    assert here.end() is None
    assert here.holds(1)
    # The forked child costs nobody its session.
    time.sleep(1.5 * HASTY_S)
    assert here.peer_state() == ("open", "")


def test_a_forked_child_exits(transport: str, local: Local, remote: Remote) -> None:
    here, there = pair(transport, local, remote)
    for _ in range(8):
        write = there.write(hold=True)
        there.release(1)
        here.until_bytes_land()
        pid, _ = there.fork()
        assert there.reap(pid) == 0, "the child exits as any process does"
        there.cancel(write)


def test_a_parents_death_is_noticed_although_its_child_lives(
    transport: str, local: Local, remote: Remote
) -> None:
    here, there = pair(transport, local, remote, silent_timeout_s=HASTY_S)
    read_lease = here.grant("read")
    there.write(hold=True)
    pid, _ = there.fork(4 * BOUND_S)
    try:
        there.kill()
        assert here.wait_lost() in {"peer-lost", "peer-silent"}
        assert here.wait_lease(read_lease) == "peer-lost"
        os.kill(pid, 0)  # the child lives
    finally:
        os.kill(pid, signal.SIGKILL)


# ---- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [("shm", 1000), ("tcp", 300)])
def test_rounds_of_connecting_grow_nothing(local: Local, remote: Remote, kind: str, count: int) -> None:
    here, there = local("here", kind), remote("dialler", kind)
    there.rounds(here.address(), 100)  # what is made once
    settle(here)
    mine, theirs = footprint(), there.footprint()
    for _ in range(count // 100):
        assert there.rounds(here.address(), 100) == 100
    settle(here)
    for before, end in ((mine, footprint), (theirs, there.footprint)):
        until_within(before, end, descriptors=4, nbytes=16 << 20)
    there.connect(here.address())
    here.accept("dialler")
    there.fill(2)
    here.grant("write")
    there.write()
    assert there.end() is None
    assert here.holds(2)


def settle(node: Node) -> None:
    """Waits until the last goodbye has arrived, and takes events off the ring."""
    until(lambda: not node.agent.peers, lambda: node.agent.peers)
    node.agent.take_notification()
    gc.collect()


# ---- pages around a pool ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after", "inside"])
@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
def test_one_byte_beyond_a_pool_is_death(where: str, huge_pages: bool, store: bool) -> None:
    code = f"""
import ctypes, faulthandler
from kvxfer import Pool
faulthandler.disable()
pool = Pool(4, 4096, huge_pages={huge_pages})
array = pool.array()
start, end = array.ctypes.data, array.ctypes.data + pool.nbytes
address = {{"before": start - 1, "after": end, "inside": end - 1}}[{where!r}]
byte = (ctypes.c_ubyte * 1).from_address(address)
if {store}:
    byte[0] = 1
else:
    byte[0]
"""
    done = fork_server.run(code, timeout=2 * BOUND_S)
    assert done.returncode == (0 if where == "inside" else -signal.SIGSEGV), done.stderr


def test_too_few_descriptors_are_told_and_nothing_is_left() -> None:
    """Making an agent fails with a clear message and leaks no descriptor, whichever descriptor is missing."""
    code = """
import gc, os, resource
from kvxfer import Agent, KvxferError

def used():
    gc.collect()  # a closed agent keeps its few until it goes
    return len(os.listdir("/proc/self/fd")) - 1

Agent("warm").close()
before = used()
told = set()
for spare in range(16):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare, 4096))
    try:
        Agent("small").close()
    except KvxferError as error:
        told.add(str(error))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    assert used() == before, (spare, used(), before)
assert told
for words in told:
    assert "Bad file descriptor" not in words, words
    print(words)
"""
    done = fork_server.run(code, timeout=2 * BOUND_S)
    assert done.returncode == 0, done.stderr
    assert "descriptor" in done.stdout or "open files" in done.stdout
