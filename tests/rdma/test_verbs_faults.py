"""The transport verbs over Soft-RoCE: peers that die or sleep in mid-transfer, and wrong settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest

from kvxfer.errors import PeerError, TransferError
from tests.fault import test_process_faults as process_faults
from tests.fault import test_standstill as standstill
from tests.fault.node import HASTY_S, MEDIUM, Node, Worker
from tests.fault.test_process_faults import LOST, join, lost
from tests.rdma import links
from tests.rdma.links import RXE0, RXE1, STRAY_ADDRESS, Device, lossy, stray_address
from tests.rdma.test_verbs import crosses_the_link, ends, meet, on, read, until_up
from tests.waiting import until

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine")]

# An acknowledgement is awaited for 1.1 s, and a packet is sent again six times: the rail survives whatever
# the other end does.
PATIENT = {"timeout": 18, "retries": 6}


@pytest.fixture
def local() -> Iterator[Callable[..., Node]]:
    """Makes nodes in this process, whose rails are on the first device."""
    with ExitStack() as closing:

        def make(name: str, _: str = "verbs", *arguments: Any, **options: Any) -> Node:
            node = Node(name, "tcp", *arguments, **{**on(RXE0), **options})
            closing.callback(node.close)
            return node

        yield make


@pytest.fixture
def remote() -> Iterator[Callable[..., Worker]]:
    """Makes nodes in their own processes, whose rails are on the second device."""
    with ExitStack() as closing:

        def make(name: str, _: str = "verbs", *arguments: Any, **options: Any) -> Worker:
            worker = Worker(name, "tcp", *arguments, **{**on(RXE1), **options})
            closing.callback(worker.finish)
            return worker

        yield make


def at_night(*values: Any, id: str) -> Any:
    """Marks parameters for the night: other parameters, tried by day, test nearly the same."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


# ---- processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stuck", [at_night(False, id="moving"), pytest.param(True, id="stuck")])
def test_a_peer_that_is_killed_in_mid_transfer_is_lost_and_no_other(
    is_stuck: bool, local: Callable[..., Node], remote: Callable[..., Worker]
) -> None:
    """ "Stuck" means that the queues are full of READs that are not answered."""
    here, victim = local("here", "", MEDIUM, **on(RXE0, **PATIENT)), remote("victim", "", MEDIUM)
    other = local("other", "", MEDIUM)  # on this end's device, so its pages do not cross the link
    evens, odds = here.all[::2], here.all[1::2]
    here.set(0)
    works, triggers = [], []
    for end, ids in ((victim, evens), (other, odds)):
        end.set(3)
        here.connect(end.address())
        end.accept("here")
        until_up(here)
        end.grant("read")
        triggers.append(here.agent.trigger())
        works.append(here.read(ids, after=triggers[-1].by_layer(1)))
        triggers[-1].fire(here.num_layers - 1)
        until(partial(here.has_any, 3, ids))
    if is_stuck:
        here.wait_layer(here.num_layers - 2, works[0])
    with lossy(RXE1) if is_stuck else nullcontext():
        if is_stuck:
            before = RXE0.sent_nbytes()
            triggers[0].fire(here.num_layers)
            until(lambda: RXE0.sent_nbytes() > before)
        assert [here.state(work) for work in works] == ["pending", "pending"]
        victim.kill()
        lost(here.end(works[0]), "peer-lost")  # in half the time after which a silent peer is lost
        assert here.wait_lost(0) == "peer-lost"
        triggers[1].fire(here.num_layers)
        assert here.end(works[1]) is None
    assert here.is_all(3, odds)
    assert here.works[works[1]].rails == ("verbs",)
    assert here.peer_state(1) == ("open", "")
    here.wait_idle()


@pytest.mark.parametrize("how", ["revoke", at_night("silence", id="silence")])
def test_a_reader_that_slept_behind_a_full_queue_reports_no_stale_bytes_done(
    how: str, local: Callable[..., Node], remote: Callable[..., Worker]
) -> None:
    """Its device continues while it sleeps, and reads pages that then have another use."""
    src = local("source", "", MEDIUM, silent_timeout_s=HASTY_S, **on(RXE0, **PATIENT))
    dst = remote("reader", "", MEDIUM, **on(RXE1, **PATIENT))
    src.set(1)
    join(src, dst)
    until(lambda: "verbs" in dst.rails())
    lease = src.grant("read")
    work = dst.read_until_bytes_land(held=True)
    dst.wait_layer(MEDIUM[0] - 2, work)
    with lossy(RXE1):  # its requests do not arrive
        before = RXE1.counter("sent_pkts")
        dst.let_go()
        until(lambda: RXE1.counter("sent_pkts") > before)
        dst.stop()
        if how == "revoke":
            assert src.revoke(lease) == "revoked"
        else:
            assert src.wait_lease(lease) == "peer-lost"
        src.set(7)
        answered = RXE0.sent_nbytes()
    if how == "revoke":
        until(lambda: RXE0.sent_nbytes() - answered > src.array.nbytes // src.num_layers // 4)
    dst.resume()
    error = dst.end(work)
    assert isinstance(error, PeerError | TransferError), error
    assert error.code in ({"lease-ended"} if how == "revoke" else LOST), error
    assert len(error.failed_blocks)
    if how == "revoke":  # otherwise nothing was tested here
        assert dst.has_any(7)
    assert src.is_all(7)


# The faults of tests/fault that depend on which side moves the bytes.
FAULTS: dict[str, Callable[..., None]] = {
    "destination killed, write": process_faults.test_destination_is_killed_while_a_write_is_open,
    "source killed, write": process_faults.test_source_is_killed_while_a_write_is_open,
    "source killed, read": partial(process_faults.test_source_is_killed_in_the_middle_of_a_read, held=False),
    "destination killed, read": process_faults.test_destination_is_killed_in_the_middle_of_a_read,
    "one of three killed": (
        process_faults.test_one_of_three_sources_is_killed_while_one_group_reads_from_all
    ),
    "one of two readers killed": (
        process_faults.test_a_reader_that_is_killed_leaves_a_bearer_lease_to_the_others
    ),
    "reader slept, silence": partial(
        process_faults.test_resumed_reader_never_reports_stale_bytes_done, how="silence", held=False
    ),
    "reader slept, revoke": partial(
        process_faults.test_resumed_reader_never_reports_stale_bytes_done, how="revoke", held=False
    ),
    "one of two readers slept": partial(
        process_faults.test_revoke_fences_every_reader_of_a_bearer_lease, order=1, held=False
    ),
    "writer slept": process_faults.test_nothing_lands_from_a_writer_that_slept_past_the_fence,
    "restarted while it hangs": process_faults.test_peer_restarts_under_its_name_while_the_old_one_hangs,
    "restarted": process_faults.test_peer_is_killed_and_restarts_under_its_name,
    "slept beyond its own patience": standstill.test_stop_beyond_its_own_patience_costs_a_process_no_peer,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_processes(fault: str, local: Callable[..., Node], remote: Callable[..., Worker]) -> None:
    FAULTS[fault]("verbs", local, remote)


# ---- set up wrongly -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "port", "lesser"),
    [
        pytest.param(1024, 0, nullcontext, 1024, id="here"),
        at_night(0, 256, nullcontext, 256, id="there"),
        pytest.param(2048, 512, nullcontext, 512, id="both"),
        at_night(0, 0, partial(links.mtu, RXE0, 1500), 1024, id="port here"),
        pytest.param(0, 0, partial(links.mtu, RXE1, 1500), 1024, id="port there"),
    ],
)
def test_ends_with_unlike_mtus_take_the_lesser(
    here: int, there: int, port: Callable[[], AbstractContextManager[None]], lesser: int
) -> None:
    with port(), ends(on(RXE0, mtu=here), on(RXE1, mtu=there)) as nodes:
        nbytes, packets = RXE1.sent_nbytes(), RXE1.sent_packets()
        assert crosses_the_link(*nodes, 5)
        mean = (RXE1.sent_nbytes() - nbytes) / (RXE1.sent_packets() - packets)
        assert lesser / 2 < mean < lesser + 100  # the headers' bytes


@pytest.mark.parametrize("device", [RXE0, RXE1], ids=["here", "there"])
def test_an_mtu_that_changes_under_living_agents_costs_a_rail_at_most(device: Device) -> None:
    with ends() as (here, there):
        assert crosses_the_link(here, there, 5)
        with links.mtu(device, 1500):
            assert read(here, there, 6) is None
            assert here.is_all(6)
            until_up(here)
            assert crosses_the_link(here, there, 7), "the new rail has the new MTU"
        assert here.peer_state() == ("open", "")


SMALL_PACKETS = ("port 1: the first READ over a new connection from GID ", "do both ends have the same MTU")


def test_a_path_that_passes_smaller_packets_than_its_ends_agreed_on_carries_no_pages_and_says_so() -> None:
    with links.narrow(RXE0, 2000):
        come_over_tcp_for(SMALL_PACKETS, on(RXE0, gid_index=1), on(RXE1, gid_index=1))
        with ends(on(RXE0, mtu=1024)) as nodes:
            assert crosses_the_link(*nodes, 5)


MISSING = ("has no GID 9", "verbs.gid_index")
REFUSED = ("there is no path from GID 1, ", f"to {STRAY_ADDRESS}", "is there a route", "verbs.gid_index")
SILENT = (
    "port 1: the first READ over a new connection from GID ",
    STRAY_ADDRESS,
    "does not answer",
    "verbs.gid_index",
)


@pytest.mark.parametrize(
    ("wrong", "stray", "words"),
    [
        pytest.param(RXE0, None, ("rxe0 port 1", *MISSING), id="missing here"),
        pytest.param(RXE1, None, ("rxe1 port 1", *MISSING), id="missing there"),
        pytest.param(
            RXE0,
            partial(stray_address, RXE0, RXE1, is_answered=False),
            ("rxe1 port 1", *REFUSED),
            id="unknown here",
        ),
        at_night(
            RXE1,
            partial(stray_address, RXE1, RXE0, is_answered=False),
            ("rxe0 port 1", *REFUSED),
            id="unknown there",
        ),
        at_night(RXE0, partial(stray_address, RXE0, RXE1, is_answered=True), SILENT, id="astray here"),
        pytest.param(RXE1, partial(stray_address, RXE1, RXE0, is_answered=True), SILENT, id="astray there"),
    ],
)
def test_a_gid_that_leads_nowhere_leaves_pages_to_tcp_and_says_so(
    wrong: Device, stray: Callable[[], AbstractContextManager[int]] | None, words: tuple[str, ...]
) -> None:
    with nullcontext(9) if stray is None else stray() as index:
        come_over_tcp_for(
            words,
            *(on(device, **({"gid_index": index} if device is wrong else {})) for device in (RXE0, RXE1)),
        )


def come_over_tcp_for(words: tuple[str, ...], its: dict[str, Any], others: dict[str, Any]) -> None:
    """Pages between such ends come over tcp, and both ends note why: one sees it, and tells the other."""
    with ExitStack() as closing:
        here, there = (Node(name, "tcp", MEDIUM, **own) for name, own in (("here", its), ("there", others)))
        for node in (here, there):
            closing.callback(node.close)
        here.connect(there.address())
        there.accept("here")
        there.grant("read")

        def told() -> list[list[str]]:
            return [list(node.peers[-1].notes) for node in (here, there)]

        until(
            lambda: all(any(all(word in note for word in words) for note in notes) for notes in told()), told
        )
        assert read(here, there, 5) is None
        assert here.is_all(5)
        assert here.works[-1].rails == ("tcp",)
        assert here.peer_state() == ("open", "")


NOT_OFFERED = "verbs is not used: the peer does not offer it (is it among the peer's transports?)"


def test_pages_of_a_peer_without_rdma_come_over_tcp_and_the_note_says_why(local: Callable[..., Node]) -> None:
    here, there = (
        local("here", "", MEDIUM),
        local("there", "", MEDIUM, transports=("tcp",), transport_options={}),
    )
    here.connect(there.address())
    there.accept("here")
    there.grant("read")
    assert read(here, there, 5) is None
    assert here.is_all(5)
    assert here.works[-1].rails == ("tcp",)
    assert here.peers[-1].notes == (NOT_OFFERED,)


def test_a_peer_without_rdma_is_no_peer_where_verbs_is_required(local: Callable[..., Node]) -> None:
    here = local("here", "", MEDIUM, require=("verbs",))
    without = local("without", "", MEDIUM, transports=("tcp",), transport_options={})
    with pytest.raises(
        PeerError, match="no verbs rail to 'without' came up, which this agent requires"
    ) as raised:
        here.connect(without.address())
    assert raised.value.code == "unreachable"
    assert NOT_OFFERED in str(raised.value)
    with_it = local("with", "", MEDIUM, **on(RXE1))
    meet(here, with_it)
    assert crosses_the_link(here, with_it, 6)
