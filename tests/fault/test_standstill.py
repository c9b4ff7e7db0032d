"""A process stands still for longer than its silence timeout: stopped here, starved elsewhere. It must not
take its own standstill for the peer's silence, nor keep a peer that is gone.
"""

from __future__ import annotations

import time

import pytest

from kvxfer.errors import PeerError, TransferError
from tests.fault.node import Local, Remote, join

# The silence timeout of the stopped node. The others have the one of `options_for`, so that no peer is lost
# in a short stop, however busy the machine is.
HASTY_S = 2.0


def test_stop_beyond_its_own_patience_costs_a_process_no_peer(
    transport: str, local: Local, remote: Remote
) -> None:
    src = local("patient", transport)
    src.fill(1)
    dst = remote("hasty", transport, silent_timeout_s=HASTY_S)
    join(src, dst)
    dst.expect(b"req")
    write = src.write(notify=b"req", hold=True)
    src.release(2)
    dst.wait_layer(1)
    for _ in range(2):
        dst.stop()
        # The length of the standstill.
        time.sleep(1.6 * HASTY_S)
        dst.resume()
        assert dst.peer_state() == ("open", "")
    src.release(4)
    assert src.end(write) is None
    assert dst.end() is None
    assert dst.holds(1)
    assert dst.peer_state() == ("open", "")
    assert src.peer_state() == ("open", "")


@pytest.mark.parametrize("transport", ["shm", "tcp"], indirect=True)  # a ring of frames, and a socket
def test_writes_to_a_peer_that_stands_still_wait_for_it(
    transport: str, local: Local, remote: Remote, seed: int
) -> None:
    """Their tables are twice as much as a session may have unsent."""
    num_writes, shape = 16, (1, 2, 262_144, 1, 1, 2)
    src = local("patient", transport, shape)
    dst = remote("stopped", transport, shape)
    join(src, dst)
    src.fill(seed)
    dst.grant("write", ttl_s=60.0)
    dst.stop()
    for _ in range(num_writes):
        src.write()
    assert src.peer_state() == ("open", "")
    dst.resume()
    assert [src.end(number) for number in range(num_writes)] == [None] * num_writes
    assert dst.holds(seed)
    assert src.peer_state() == ("open", "")


def test_pause_of_the_whole_machine_costs_nobody_a_peer(transport: str, remote: Remote) -> None:
    """Both processes stop, and the one with the short timeout continues first: nothing waits to be read."""
    silent_s = 10.0
    src = remote("patient", transport)
    dst = remote("hasty", transport, silent_timeout_s=silent_s)
    src.fill(2)
    dst.connect(src.address())
    src.accept("hasty")
    dst.grant("write", ttl_s=60.0)
    src.write(hold=True)
    src.release(2)
    dst.until_bytes_land()
    for process in (src, dst):
        process.stop()
    # The length of the standstill.
    time.sleep(silent_s + 0.5)
    dst.resume()
    # It reads its clock within a heartbeat, and leaves the other at least half of its timeout: five seconds,
    # in case this process is kept waiting. If the machine stalls for as long, it is another standstill.
    time.sleep(0.5)
    assert dst.peer_state() == ("open", "")
    src.resume()
    src.release(4)
    assert src.end() is None
    assert dst.holds(2)
    assert dst.peer_state() == ("open", "")


def test_peer_that_hangs_since_the_stop_is_found_out(transport: str, remote: Remote) -> None:
    src = remote("patient", transport)
    dst = remote("hasty", transport, silent_timeout_s=HASTY_S)
    src.fill(3)
    dst.connect(src.address())
    src.accept("hasty")
    lease = dst.grant("write")
    work = dst.expect(b"req")
    src.write(notify=b"req", hold=True)
    dst.stop()
    src.stop()  # for good
    # The length of dst's standstill.
    time.sleep(1.5 * HASTY_S)
    dst.resume()
    assert dst.wait_lost() == "peer-silent"
    assert dst.wait_lease(lease) == "peer-lost"
    error = dst.end(work)
    assert isinstance(error, PeerError | TransferError), error
    assert error.code == "peer-silent"


def test_process_that_was_given_up_while_it_was_stopped_is_told_why(
    transport: str, local: Local, remote: Remote
) -> None:
    src = local("hasty", transport, silent_timeout_s=HASTY_S)
    src.fill(4)
    dst = remote("patient", transport)
    join(src, dst)
    dst.grant("write")
    write = src.write(hold=True)
    src.release(1)
    dst.until_bytes_land()
    dst.stop()
    assert src.wait_lost() == "peer-silent"
    error = src.end(write)
    assert isinstance(error, PeerError | TransferError), error
    assert error.code == "peer-silent"
    dst.resume()
    assert dst.wait_lost() == "peer-lost"
    words = dst.loss_in_words()
    assert "said goodbye (peer-silent): nothing heard for" in words, words
