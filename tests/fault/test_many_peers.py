"""Two hundred peers of one agent; a third of them is killed or closed in the middle of its writes."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvxfer.errors import PeerError, TransferError
from tests.fault import confinement, crowd
from tests.fault.node import Local, Remote, footprint, until_within
from tests.fault.test_process_faults import works_with
from tests.waiting import until

NUM_PEERS, NUM_PROCESSES = 200, 3
# The last process is killed. In the others, each peer closes whose number is a multiple of this.
CLOSES_EACH = 20


@pytest.fixture
def _descriptors() -> None:
    # 6 for each peer, as `kvxfer doctor` counts them, beside the process's other descriptors.
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("more open files are needed than the hard limit allows: ulimit -Hn 4096")
    confinement.enough_descriptors()


@pytest.mark.usefixtures("_descriptors")
@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_two_hundred_peers_of_which_a_third_goes(transport: str, local: Local, remote: Remote) -> None:
    parts = [list(range(NUM_PEERS))[at::NUM_PROCESSES] for at in range(NUM_PROCESSES)]
    shape = (*crowd.SHAPE[:2], NUM_PEERS, *crowd.SHAPE[3:])
    hub = local("hub", transport, shape)
    processes = [
        remote(f"process-{at}", transport, first=confinement.enough_descriptors)
        for at in range(NUM_PROCESSES)
    ]
    assert remote("first", transport).rounds(hub.address(), 1) == 1  # what is made once
    hub.wait_idle()
    before = footprint()
    incoming = [hub.expect(crowd.name_of(number).encode(), [number]) for number in range(NUM_PEERS)]
    with ThreadPoolExecutor() as threads:
        for joined in [
            threads.submit(process.do, crowd.join, part, transport, hub.address())
            for process, part in zip(processes, parts, strict=True)
        ]:
            joined.result()
    for number in range(NUM_PEERS):
        assert hub.accept(crowd.name_of(number)) == number
    for process, part in zip(processes, parts, strict=True):
        process.do(crowd.begin, part)
    for work in incoming:
        hub.wait_layer(crowd.SHAPE[0] // 2 - 1, work)

    killed = set(parts[-1])
    closed = {number for part in parts[:-1] for number in part if number % CLOSES_EACH == 0}
    processes[-1].kill()
    for process, part in zip(processes, parts, strict=True):
        if process is not processes[-1]:
            process.do(crowd.close, sorted(closed & set(part)))
            stay = [number for number in part if number not in closed]
            assert process.do(crowd.finish, stay) == [None] * len(stay)
    for number in range(NUM_PEERS):
        error = hub.end(incoming[number])
        if number in killed | closed:
            assert isinstance(error, PeerError | TransferError), error
            assert error.failed_blocks.tolist() == [number]
            assert hub.wait_lost(number) == "peer-lost"
        else:
            assert error is None, error
            assert (hub.array[:, :, number] == number).all()
            assert hub.peer_state(number) == ("open", "")

    for process, part in zip(processes[:-1], parts[:-1], strict=True):
        process.do(crowd.close, [number for number in part if number not in closed])
    until(lambda: not hub.agent.peers, lambda: hub.agent.peers)
    until_within(before)
    hub.wait_idle()
    works_with(hub, remote("newcomer", transport, shape), 5)
