"""Two hosts on a cable that loses, duplicates, reorders and alters packets: no wrong byte is done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.errors import KvxferError, PeerError, TransferError
from tests.fault.bad_cable import BadCable, Ills, why_not
from tests.fault.node import SECRET, SMALL, Worker

ILLS = {
    "lost": Ills(lost=0.03),
    "doubled": Ills(doubled=0.1),
    "late": Ills(late=0.1),
    "spoilt": Ills(spoilt=0.02),
    "all": Ills(lost=0.01, doubled=0.03, late=0.03, spoilt=0.01),
}


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if reason := why_not():
        pytest.skip(f"a cable whose packets can be touched: {reason}")


@pytest.fixture
def cable(seed: int) -> Iterator[BadCable]:
    with BadCable(seed) as one:
        yield one


@pytest.fixture
def ends(cable: BadCable) -> tuple[Worker, Worker]:
    """A node at each end, connected."""
    here, there = (
        host.node(name, "tcp", SMALL, listen=f"tcp://{host.ipv4}:0", secret=SECRET)
        for host, name in ((cable.here, "here"), (cable.there, "there"))
    )
    meet(here, there)
    return here, there


def meet(here: Worker, there: Worker) -> None:
    here.connect(there.address())
    there.accept("here")


def test_packets_that_are_lost_doubled_late_or_spoilt_cost_time_alone(
    cable: BadCable, ends: tuple[Worker, Worker]
) -> None:
    here, there = ends
    for seed, (name, ills) in enumerate(ILLS.items()):
        cable.counts.clear()
        cable.ills = ills
        there.fill(seed)
        there.grant("read")
        here.read(lease=there.token())
        assert here.end() is None, name
        assert here.holds(seed), name
        here.fill(seed + 100)
        there.grant("write")
        here.write(lease=there.token())
        assert here.end() is None, name
        assert there.holds(seed + 100), name
        assert here.peer_state() == there.peer_state() == ("open", "")
        wanted = [ill for ill in ("lost", "doubled", "late", "spoilt") if getattr(ills, ill)]
        assert all(cable.counts[ill] for ill in wanted), (name, cable.counts)


def test_what_no_checksum_of_the_network_finds_is_never_taken_for_good(
    cable: BadCable, ends: tuple[Worker, Worker]
) -> None:
    """With `integrity`. A frame that was altered ends its session, a page its transfer."""
    here, there = ends
    found: list[str] = []
    for seed in range(6):
        # The last alteration may be found after everything is done.
        try:
            if here.peer_state()[0] != "open" or there.peer_state()[0] != "open":
                here.disconnect()
                there.disconnect()
                meet(here, there)
            error = reads(cable, ends, seed)
        except PeerError as lost:
            error = lost
        if error is None:
            assert here.holds(seed)
        else:
            assert isinstance(error, PeerError | TransferError), error
            found.append(error.code)
    assert found, cable.counts
    here.disconnect()
    there.disconnect()
    meet(here, there)
    assert reads(cable, ends, 7, altered=0.0) is None
    assert here.holds(7)


def reads(
    cable: BadCable, ends: tuple[Worker, Worker], seed: int, altered: float = 0.002
) -> KvxferError | None:
    """Moves all pages from there to here; returns the error, which names all blocks that may be wrong."""
    here, there = ends
    there.fill(seed)
    there.grant("read")
    token = there.token()
    cable.ills = Ills(altered=altered)
    try:
        here.read(lease=token, integrity=True)
        error: KvxferError | None = here.end()
    finally:
        cable.ills = Ills()
    assert error is None or len(error.failed_blocks), error
    return error
