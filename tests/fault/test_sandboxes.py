"""Two processes of one host that cannot fully see each other: seccomp, other users, PID namespaces.

What they cannot share moves another way, and a note says why; the bytes are the same.
"""

from __future__ import annotations

import os
import platform
from functools import partial
from typing import Any, Final

import pytest

from kvxfer.errors import PeerError
from tests.fault import confinement
from tests.fault.node import SECRET, Local, Remote, moves_both_ways

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to become another user needs root")
# In such a namespace the first process is the node; it ends with the signalled process.
OTHER_PIDS: Final = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
# Two users that are not root, because root may read every process.
USERS: Final = (65533, 65534)
BOTH: Final = ("shm", "unix")
pooled_or_not = pytest.mark.parametrize("pooled", [True, False], ids=["pool", "foreign"])


def meet(here: Any, there: Any, rails: tuple[str, ...] = BOTH) -> None:
    """Connects `there` to `here`, and moves all pages, by a read and a write of each."""
    there.connect(here.address())
    here.accept(there.name_of())
    for seed, (reader, owner) in ((1, (here, there)), (3, (there, here))):
        reader.wait_rails(*rails)
        moves_both_ways(reader, owner, seed)


def fetches(node: Any, transport: str, *why: str) -> None:
    """Asserts how a node fetches its peer's pages, and the words of its notes."""
    path, notes = node.path()
    assert path == transport, notes
    for words in why:
        assert words in notes


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="its calls' numbers are unknown")
@pooled_or_not
def test_a_process_that_may_not_read_others(local: Local, remote: Remote, pooled: bool) -> None:
    """A container's seccomp filter forbids process_vm_readv; pools are still mapped."""
    here = local("free", "shm", pooled=pooled)
    there = remote("filtered", "shm", pooled=pooled, first=confinement.forbid_process_vm_readv)
    meet(here, there)
    fetches(here, "shm")
    if pooled:
        fetches(there, "shm")
    else:
        fetches(there, "unix", "process_vm_readv", "a seccomp profile forbids the call", "kvxfer pool")


@needs_root
@pytest.mark.parametrize(
    ("shm_peers", "pooled"),
    [("user", True), ("secret", True), ("secret", False)],
    ids=["user", "secret-pool", "secret"],
)
def test_another_user_of_the_host(remote: Remote, shm_peers: str, pooled: bool) -> None:
    """With a secret. Pages move over a stream, unless the user may map their memory."""
    here, there = (
        remote(
            f"user-{uid}",
            "shm",
            first=partial(confinement.become, uid),
            pooled=pooled,
            secret=SECRET,
            shm_peers=shm_peers,
        )
        for uid in USERS
    )
    meet(here, there, BOTH if shm_peers == "secret" else ("unix",))
    for end in (here, there):
        if shm_peers == "user":
            fetches(end, "unix")
        elif pooled:
            fetches(end, "shm")
        else:
            fetches(end, "unix", "process_vm_readv", "run both as one user", "kvxfer pool")
    if shm_peers == "user":
        fetches(there, "unix", "memory is shared only with its own user", "shm_peers")


@needs_root
def test_another_user_of_the_host_without_a_secret(local: Local, remote: Remote) -> None:
    """It is refused, and served when both have the same secret."""
    closed, opened = local("closed", "shm"), local("open", "shm", secret=SECRET)
    stranger = remote("stranger", "shm", secret=SECRET, first=partial(confinement.become, USERS[0]))
    with pytest.raises(PeerError) as caught:
        stranger.connect(closed.address())
    assert caught.value.code == "auth-failed"
    assert "give both agents the same secret" in str(caught.value)
    assert closed.agent.peers == ()
    meet(opened, stranger, ("unix",))


@pytest.mark.parametrize(
    ("both", "pooled"), [(False, False), (True, True), (True, False)], ids=["one", "each-pool", "each"]
)
def test_a_pid_namespace_of_its_own(remote: Remote, both: bool, pooled: bool) -> None:
    """Pools are mapped. Memory outside of pools is read only by a process that has a number for the other."""
    if reason := confinement.why_not(*OTHER_PIDS):
        pytest.skip(reason)
    here = remote("here", "shm", pooled=pooled, within=OTHER_PIDS if both else ())
    there = remote("there", "shm", pooled=pooled, within=OTHER_PIDS)
    meet(here, there)
    unseen = ("is not visible in this pid namespace", "start both containers with a common one")
    for end, sees in ((here, not both), (there, False)):
        if pooled or sees:
            fetches(end, "shm")
        else:
            fetches(end, "unix", *unseen)
