"""Work that ends early: revoked, deregistered, cancelled, closed over, overdue; and work that is refused.

Between two processes, over shm and tcp. Fenced blocks are overwritten at once and compared.
"""

from __future__ import annotations

import random
import time

import pytest

from kvxfer.errors import AgentError, KvxferError, PeerError, TransferError
from tests.fault.node import MEDIUM, Local, Node, Remote, Worker


@pytest.fixture
def here(transport: str, local: Local) -> Node:
    return local("here", transport, MEDIUM)


@pytest.fixture
def there(transport: str, remote: Remote, here: Node) -> Worker:
    """The other process: filled and connected."""
    worker = remote("there", transport, MEDIUM)
    worker.fill(3)
    here.connect(worker.address())
    worker.accept("here")
    return worker


def ended(error: KvxferError | None, *codes: str) -> None:
    """Asserts an error of only the transfer, which names blocks."""
    assert isinstance(error, TransferError), error
    assert error.code in codes, error
    assert len(error.failed_blocks)


def still_works(here: Node, there: Worker) -> None:
    """Asserts that a few blocks still move both ways in the same session.

    The leases are named, because earlier leases of these blocks may have ended, and a transfer posted before
    the news of a new lease does not use it.
    """
    assert here.peer_state() == ("open", "")
    there.grant("read", [1, 2])
    there.fill(11)
    here.read([1, 2], lease=there.token())
    assert here.end() is None
    assert here.holds(11, [1, 2])
    there.grant("write", [5])
    here.fill(12)
    here.write([5], lease=there.token())
    assert here.end() is None
    assert there.holds(12, [5])


# ---- fences ---------------------------------------------------------------------------------------


#: A held transfer is open when its fence comes; a free one may have ended on a slow machine.
free_or_held = pytest.mark.parametrize("held", [False, True], ids=["free", "held"])


@free_or_held
@pytest.mark.parametrize("how", ["revoke", "deregister"])
def test_fence_at_the_destination(here: Node, there: Worker, how: str, held: bool) -> None:
    here.grant("write")
    there.write_all_but_the_last_layer() if held else there.write()
    here.until_bytes_land()
    here.revoke() if how == "revoke" else here.deregister()
    here.set(7)
    if held:
        there.release(MEDIUM[0])
    error = there.end()
    assert here.stays(7), "bytes landed after the fence"
    if held or error is not None:
        ended(error, "lease-ended", "region-gone")
    assert here.peer_state() == ("open", "")
    if how == "revoke":
        still_works(here, there)


@free_or_held
@pytest.mark.parametrize("how", ["revoke", "deregister"])
def test_fence_at_the_source(here: Node, there: Worker, how: str, held: bool, seed: int) -> None:
    """The source is the other process: a read is done with the earlier bytes, or not done."""
    there.grant("read")
    read = here.read_until_bytes_land(held=held)
    # The moment of the fault.
    time.sleep(random.Random(seed).random() * 0.005)
    there.revoke() if how == "revoke" else there.deregister()
    there.set(7)
    here.let_go()
    error = here.end(read)
    if error is None and not held:
        assert here.holds(3)
    else:
        ended(error, "lease-ended", "region-gone")
    assert here.peer_state() == ("open", "")
    if how == "revoke":
        still_works(here, there)


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_fences_hold_while_layers_are_held_back(here: Node, there: Worker, how: str) -> None:
    """Deterministic: half has arrived, and the rest is released after the fence."""
    # Long enough for half to arrive on a machine that stands still for a moment.
    lease = here.grant("write", ttl_s=4.0, renewable=False) if how == "expired" else here.grant("write")
    write = there.write(hold=True)
    there.release(2)
    here.until_bytes_land()
    assert (here.wait_lease(lease) if how == "expired" else here.revoke(lease)) == how
    here.set(7)
    there.release(8)
    ended(there.end(write), "lease-ended")
    assert here.is_all(7)
    still_works(here, there)


# ---- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["source", "destination"])
def test_cancel(here: Node, there: Worker, where: str) -> None:
    incoming = here.expect(b"req")
    write = there.write(notify=b"req", hold=True)
    there.release(4)
    here.wait_layer(1, incoming)
    there.cancel(write) if where == "source" else here.cancel(incoming)
    error = there.end(write)
    ended(error, *(("cancelled",) if where == "source" else ("cancelled", "not-permitted", "lease-ended")))
    if where == "source":
        here.cancel(incoming)
    # A piece that the source stopped in its middle may report the end before the source's own message does.
    ended(here.end(incoming), "cancelled", *(("lease-ended",) if where == "source" else ()))
    here.set(7)
    assert here.stays(7)
    still_works(here, there)


@free_or_held
def test_cancelled_read(here: Node, there: Worker, held: bool) -> None:
    there.grant("read")
    read = here.read_until_bytes_land(held=held)
    here.cancel(read)
    here.let_go()
    error = here.end(read)
    if error is None and not held:
        assert here.holds(3)
    else:
        ended(error, "cancelled")
    here.set(7)
    assert here.stays(7)
    still_works(here, there)


@pytest.mark.parametrize("end", ["source", "destination"])
def test_agent_is_closed_with_work_in_flight(here: Node, there: Worker, end: str) -> None:
    there.grant("read")
    lease = here.grant("read")
    write_lease = there.grant("write")
    write = here.write([0, 1], hold=True)
    read = here.read_until_bytes_land(held=True)
    if end == "source":
        there.close()
        for work in (read, write):
            error = here.end(work)
            assert isinstance(error, PeerError | TransferError), error
            assert len(error.failed_blocks)
        assert here.wait_lease(lease) == "peer-lost"
        assert here.wait_lost() in {"peer-lost", "closed"}
        return
    here.close()
    here.set(7)
    for work in (read, write):
        assert here.state(work) in ("failed", "cancelled")
    assert here.stays(7), "bytes landed in memory of a closed agent"
    assert there.wait_lease(write_lease) == "peer-lost"
    with pytest.raises(AgentError) as caught:
        here.read()
    assert caught.value.code == "closed"


def test_deadline(here: Node, there: Worker) -> None:
    incoming = here.expect(b"req", timeout_s=0.5)
    write = there.write(notify=b"req", hold=True, timeout_s=0.5)
    there.release(1)
    error = here.end(incoming)
    # Either end's deadline may come first. A piece that the source stopped in its middle may report the end
    # before the source's own message does.
    ended(error, "deadline", "lease-ended")
    assert sorted(error.failed_blocks.tolist()) == here.all  # type: ignore[union-attr]
    ended(there.end(write), "deadline", "lease-ended", "not-permitted")
    here.set(7)
    assert here.stays(7)
    still_works(here, there)


# ---- refused --------------------------------------------------------------------------------------


def test_nothing_is_read_or_written_without_a_lease(here: Node, there: Worker) -> None:
    there.grant("write", [0, 1])
    there.grant("read", [2])
    for ids in ([0, 2], [3]):
        here.write(ids)
        ended(here.end(), "not-permitted")
    for ids in ([0], [2, 3]):
        here.read(ids)
        ended(here.end(), "not-permitted")
    assert there.holds(3)
    assert here.is_all(0)
    still_works(here, there)


# ---- bounded things ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bound_here", [8, 4096])
def test_more_in_flight_than_a_peer_takes(
    transport: str, local: Local, remote: Remote, bound_here: int
) -> None:
    """Back-pressure is not a failure if both ends know the bound; an end that does not is told."""
    here = local("here", transport, max_transfers_per_peer=bound_here)
    there = remote("there", transport, max_transfers_per_peer=8)
    here.fill(1)
    here.connect(there.address())
    there.accept("here")
    there.grant("write")
    works = [here.write([0], hold=True) for _ in range(100)]
    for work in works:
        here.release(here.num_layers, work)
    errors = [here.end(work) for work in works]
    if bound_here == 8:
        assert errors == [None] * 100
    else:
        codes = {error.code for error in errors if error is not None}
        assert codes, "nothing was refused"
        assert codes <= {"exhausted", "refused"}, codes
        assert errors.count(None) >= 8
    here.wait_idle()
    there.wait_idle()
    here.write()
    assert here.end() is None
    assert there.holds(1)
