"""The peer's process is killed, stopped or restarted in mid-transfer. The survivor says what was lost.

Transfers of 64 MiB, or held ones that wait for the fault. Free ones may end before the fault on a slow
machine; their tests check the outcomes that are then allowed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import kvxfer
from kvxfer.errors import ExhaustedError, PeerError, TransferError

# tests/rdma has the same of these, too.
from tests.fault.node import BOUND_S, HASTY_S, LARGE, SECRET, Local, Node, Remote, Worker
from tests.fault.node import LOST as LOST
from tests.fault.node import join as join
from tests.fault.node import lost as lost

# By night all tests run where the source writes; these do by day, too.
also_written = pytest.mark.parametrize("transport", ["shm", "tcp", "ucx", "libfabric", "libfabric-written"])


def works_with(survivor: Node, newcomer: Worker, seed: int) -> None:
    """Asserts that the agent is usable: a second peer moves everything both ways."""
    join(survivor, newcomer)
    newcomer.fill(seed)
    newcomer.grant("read")
    survivor.grant("write")
    survivor.read()
    assert survivor.end() is None
    assert survivor.holds(seed)
    newcomer.fill(seed + 1)
    newcomer.write()
    assert newcomer.end() is None
    assert survivor.holds(seed + 1)


_log: list[str] = []


def keep_log() -> None:
    """Keeps what this process logs from now on, for `kept_log`."""
    handler = logging.Handler()
    handler.emit = lambda record: _log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvxfer").addHandler(handler)
    logging.getLogger("kvxfer").setLevel(logging.DEBUG)


def kept_log() -> list[str]:
    return _log


# ---- killed -------------------------------------------------------------------------------------


@also_written
def test_destination_is_killed_while_a_write_is_open(transport: str, local: Local, remote: Remote) -> None:
    src = local("survivor", transport)
    src.fill(1)
    dst = remote("victim", transport)
    join(src, dst)
    dst.expect(b"req")
    lease = src.grant("read")
    table = src.pool.allocate(len(src.all), "req")
    write = src.write(notify=b"req", hold=True)
    src.release(2)
    dst.wait_layer(1)
    assert dst.holds(1, layers=range(2))
    dst.kill()
    error = src.end(write)
    lost(error)
    assert src.wait_lease(lease) == "peer-lost"
    src.pool.free(table)
    assert src.pool.close() == {}
    works_with(src, remote("second", transport), 5)
    src.wait_idle()


@also_written
def test_source_is_killed_while_a_write_is_open(transport: str, local: Local, remote: Remote) -> None:
    dst = local("survivor", transport)
    src = remote("victim", transport)
    src.fill(2)
    join(dst, src)
    table = dst.pool.allocate(len(dst.all), "req")
    lease = dst.grant("write")
    incoming = dst.expect(b"req")
    src.write(notify=b"req", hold=True)
    src.release(2)
    dst.wait_layer(1, incoming)
    assert dst.holds(2, layers=range(2))
    src.kill()
    error = dst.end(incoming)
    assert isinstance(error, PeerError | TransferError), error
    assert sorted(error.failed_blocks.tolist()) == dst.all
    assert dst.wait_lease(lease) == "peer-lost"
    dst.pool.free(table)
    assert dst.pool.close() == {}
    works_with(dst, remote("second", transport), 5)
    dst.wait_idle()


def test_one_of_three_sources_is_killed_while_one_group_reads_from_all(
    transport: str, local: Local, remote: Remote
) -> None:
    dst = local("survivor", transport, LARGE)
    sources = [remote(f"source-{at}", transport, LARGE) for at in range(3)]
    thirds = [dst.all[at::3] for at in range(3)]
    for at, src in enumerate(sources):
        src.fill(at)
        join(dst, src)
        src.grant("read")
    dst.set(0)
    # The stopped victim holds its third back until it is killed; the others send theirs.
    sources[1].stop()
    reads = [dst.read(ids, at) for at, ids in enumerate(thirds)]
    group = kvxfer.Group([dst.works[work] for work in reads], cancel_on_failure=False)
    for at in (0, 2):
        assert dst.end(reads[at]) is None
    assert group.state == "pending"
    sources[1].kill()
    with pytest.raises(PeerError, match="1 of 3 transfers failed") as raised:
        group.wait(BOUND_S)
    lost(raised.value)
    assert raised.value.peer == "source-1"
    assert raised.value.failed_blocks.tolist() == thirds[1]
    for at in (0, 2):
        assert dst.holds(at, thirds[at])
    works_with(dst, remote("second", transport, LARGE), 5)
    dst.wait_idle()


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_source_is_killed_in_the_middle_of_a_read(
    transport: str, local: Local, remote: Remote, held: bool
) -> None:
    dst = local("survivor", transport, LARGE)
    src = remote("victim", transport, LARGE)
    src.fill(1)
    join(dst, src)
    src.grant("read")
    read = dst.read_until_bytes_land(held=held)
    src.kill()
    error = dst.end(read)
    if error is None and not held:
        assert dst.holds(1)
    else:
        lost(error)
    assert dst.wait_lost() in LOST
    dst.wait_idle()


def test_destination_is_killed_in_the_middle_of_a_read(transport: str, local: Local, remote: Remote) -> None:
    src = local("survivor", transport, LARGE)
    dst = remote("victim", transport, LARGE)
    src.fill(1)
    join(src, dst)
    lease = src.grant("read")
    dst.read_until_bytes_land(held=True)
    dst.kill()
    assert src.wait_lease(lease) == "peer-lost"
    assert src.wait_lost() in LOST
    assert src.holds(1)
    src.wait_idle()


def test_a_reader_that_is_killed_leaves_a_bearer_lease_to_the_others(
    transport: str, local: Local, remote: Remote
) -> None:
    src = local("source", transport, LARGE)
    src.fill(3)
    src.grant("read", peer=None)
    token = src.token()
    victim, survivor = remote("victim", transport, LARGE), remote("survivor", transport, LARGE)
    join(src, victim)
    join(src, survivor)
    read = survivor.read(lease=token)
    victim.read_until_bytes_land(lease=token, held=True)
    victim.kill()
    assert survivor.end(read) is None
    assert survivor.holds(3)
    assert src.wait_lost(0) in LOST
    assert src.lease_state() == "active"
    # Its successor got the token, too.
    successor = remote("victim", transport, LARGE)
    join(src, successor)
    successor.read(lease=token)
    assert successor.end() is None
    assert successor.holds(3)
    src.wait_idle()


# ---- stopped ------------------------------------------------------------------------------------


@also_written
def test_destination_is_stopped_while_a_write_is_open(transport: str, local: Local, remote: Remote) -> None:
    src = local("survivor", transport, silent_timeout_s=HASTY_S)
    src.fill(1)
    dst = remote("victim", transport)
    join(src, dst)
    dst.grant("write")
    lease = src.grant("read")
    write = src.write(hold=True)
    src.release(2)
    dst.until_bytes_land()
    dst.stop()
    lost(src.end(write), "peer-silent")
    assert src.wait_lease(lease) == "peer-lost"
    works_with(src, remote("second", transport), 5)
    dst.resume()
    assert dst.wait_lost() in LOST


def test_a_peer_that_is_stopped_has_not_heard_of_a_lease(
    transport: str, local: Local, remote: Remote
) -> None:
    owner = local("survivor", transport, silent_timeout_s=HASTY_S)
    reader = remote("victim", transport)
    join(owner, reader)
    (peer,) = owner.agent.peers
    assert owner.region.grant(peer, [1]).wait(BOUND_S).active
    reader.stop()
    revoked, lost_with_it = owner.region.grant(peer, [2]), owner.region.grant(peer, [3])
    with pytest.raises(TimeoutError, match="victim has not acknowledged <Lease "):
        revoked.wait(0)
    with ThreadPoolExecutor() as threads:
        waits = [threads.submit(lease.wait, BOUND_S) for lease in (revoked, lost_with_it)]
        # Neither ends by itself.
        time.sleep(0.05)
        assert not waits[0].done()
        revoked.revoke_blocking()
        with pytest.raises(TransferError, match="grant another") as caught:
            waits[0].result(BOUND_S)
        assert caught.value.code == "lease-ended"
        with pytest.raises(PeerError) as lost:
            waits[1].result(BOUND_S)
        assert lost.value.code == "peer-silent"


def test_a_peer_that_is_stopped_takes_no_more_messages_than_there_is_room_for(
    transport: str, local: Local, remote: Remote
) -> None:
    sender, reader = local("survivor", transport), remote("victim", transport)
    join(sender, reader)
    (peer,) = sender.agent.peers
    reader.stop()
    sent = 256
    for number in range(sent):
        peer.send(b"%d" % number)
    with pytest.raises(ExhaustedError):
        peer.send(b"one too many")
    works_with(sender, remote("second", transport), 5)
    reader.resume()
    assert reader.read_messages(sent) == [b"%d" % number for number in range(sent)]
    peer.sendable_blocking(timeout_s=BOUND_S)
    reader.stop()
    # Messages that it took earlier may be acknowledged only now, which makes room for as many again.
    with contextlib.suppress(ExhaustedError):
        for _ in range(2 * sent):
            peer.send(b"unread")
    reader.kill()
    with pytest.raises(PeerError):
        peer.sendable_blocking(timeout_s=BOUND_S)
    sender.wait_idle()


@pytest.mark.parametrize(("how", "held"), [("silence", False), ("revoke", False), ("revoke", True)])
def test_resumed_reader_never_reports_stale_bytes_done(
    transport: str, local: Local, remote: Remote, how: str, held: bool
) -> None:
    """Contract 5 at the source: the lease ended and the pages were reused while the reader was stopped."""
    src = local("survivor", transport, LARGE, silent_timeout_s=HASTY_S)
    dst = remote("victim", transport, LARGE)
    src.fill(1)
    join(src, dst)
    lease = src.grant("read")
    read = dst.read_until_bytes_land(held=held)
    dst.stop()
    if how == "revoke":
        assert src.revoke(lease) == "revoked"
    else:
        assert src.wait_lease(lease) == "peer-lost"
    src.set(7)
    dst.resume()
    dst.let_go()
    error = dst.end(read)
    if error is None and not held:
        assert dst.holds(1), "done with bytes of another use of the pages"
    else:
        assert isinstance(error, PeerError | TransferError), error
        assert len(error.failed_blocks)
    assert src.is_all(7)


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
@pytest.mark.parametrize("order", [1, -1], ids=["sleeper first", "awake first"])
def test_revoke_fences_every_reader_of_a_bearer_lease(
    transport: str, local: Local, remote: Remote, order: int, held: bool
) -> None:
    """Contract 5 at the source, for two readers at once: one is stopped, one continues."""
    src = local("source", transport, LARGE)
    src.fill(1)
    src.grant("read", peer=None)
    token = src.token()
    sleeper, awake = remote("sleeper", transport, LARGE), remote("awake", transport, LARGE)
    join(src, sleeper)
    join(src, awake)
    # On two processors, the order decides which reader is in the middle when the lease ends.
    for reader in (sleeper, awake)[::order]:
        reader.read_until_bytes_land(lease=token, held=held)
    sleeper.stop()
    assert src.revoke() == "revoked"
    src.set(7)
    sleeper.resume()
    for reader in (sleeper, awake):
        reader.let_go()
        error = reader.end()
        if error is None and not held:
            assert reader.holds(1), "done with bytes of another use of the pages"
        else:
            assert isinstance(error, PeerError | TransferError), error
            assert error.code in {"lease-ended", *LOST}, error
            assert len(error.failed_blocks)
    # The token is no longer valid.
    awake.read(lease=token)
    assert awake.end().code == "lease-ended"
    assert src.is_all(7)


@also_written
def test_nothing_lands_from_a_writer_that_slept_past_the_fence(
    transport: str, local: Local, remote: Remote
) -> None:
    """Contract 5 at the destination: bytes that were under way when the source stopped do not land."""
    dst = local("survivor", transport, LARGE, silent_timeout_s=HASTY_S)
    src = remote("victim", transport, LARGE)
    src.fill(3)
    join(dst, src)
    lease = dst.grant("write")
    src.write_all_but_the_last_layer()
    dst.until_bytes_land()
    src.stop()
    assert dst.wait_lease(lease) == "peer-lost"
    dst.set(7)
    src.resume()
    src.release(LARGE[0])
    lost(src.end())
    assert dst.stays(7), "bytes landed after the fence"


def test_source_is_stopped_before_the_rest_of_a_write(transport: str, local: Local, remote: Remote) -> None:
    """The writer releases the rest after its lease ended."""
    dst = local("survivor", transport, silent_timeout_s=HASTY_S)
    src = remote("victim", transport)
    src.fill(4)
    join(dst, src)
    lease = dst.grant("write")
    incoming = dst.expect(b"req")
    write = src.write(notify=b"req", hold=True)
    src.release(1)
    dst.wait_layer(0, incoming)
    src.stop()
    assert dst.wait_lost() == "peer-silent"
    assert dst.end(incoming) is not None
    assert dst.wait_lease(lease) == "peer-lost"
    dst.set(7)
    src.resume()
    src.release(4)
    lost(src.end(write))
    assert dst.stays(7)


def test_who_calls_a_stopped_agent_is_told_so_and_nobody_is_accused_of_another_secret(
    transport: str, local: Local, remote: Remote
) -> None:
    caller = local("caller", transport, secret=SECRET)
    victim = remote("victim", transport, secret=SECRET)
    victim.do(keep_log)
    address = victim.address()
    victim.stop()
    for _ in range(2):
        with pytest.raises(PeerError, match="although it accepted the connection: it is stopped") as caught:
            caller.connect(address, 0.5)
        assert caught.value.code == "no-answer"
    victim.resume()
    caller.connect(address)
    victim.accept("caller")
    told = [line for line in victim.do(kept_log) if "closed the connection before it was answered" in line]
    assert len(told) == 2, victim.do(kept_log)
    assert not [line for line in victim.do(kept_log) if "secret" in line]


# ---- restarted ----------------------------------------------------------------------------------


def test_peer_restarts_under_its_name_while_the_old_one_hangs(
    transport: str, local: Local, remote: Remote
) -> None:
    src = local("survivor", transport)
    src.fill(1)
    old = remote("victim", transport)
    join(src, old)
    first = src.peers[-1]
    old.grant("write")
    write = src.write(hold=True)
    src.release(2)
    old.until_bytes_land()
    old.stop()  # its sockets stay open: only the newcomer's session shows that it is gone
    new = remote("victim", transport)
    join(src, new)
    lost(src.end(write), "peer-restarted")
    assert src.peers[-1] is not first
    assert src.peers[-1].incarnation != first.incarnation
    new.grant("write")
    src.write()
    assert src.end() is None
    assert new.holds(1)
    old.resume()
    assert old.wait_lost() in LOST
    assert src.peer_state()[0] == "open", "the old incarnation must not push out the new one"


def test_peer_is_killed_and_restarts_under_its_name(transport: str, local: Local, remote: Remote) -> None:
    src = local("survivor", transport)
    src.fill(1)
    old = remote("victim", transport)
    join(src, old)
    old.grant("write")
    write = src.write(hold=True)
    src.release(2)
    old.until_bytes_land()
    old.kill()
    lost(src.end(write))
    new = remote("victim", transport)
    works_with(src, new, 9)
