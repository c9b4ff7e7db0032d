"""Copy programs: an agent and its peers keep those that were used last, however many there are."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, LeaseToken, Region, RegionDescriptor
from kvxfer.session import program_cache

BOUND_S = 60.0


class Ends:
    """Two agents with `num` regions each. Region i of `there` is filled with i + 1."""

    def __init__(self, here: Agent, there: Agent, num: int) -> None:
        self.here, self.there = here, there
        self.pages = [np.zeros((num, 8), np.uint8) for _ in range(num)]
        self.mine = [here.register(f"r{i}", pages) for i, pages in enumerate(self.pages)]
        theirs = [there.register(f"r{i}", np.full((num, 8), i + 1, np.uint8)) for i in range(num)]
        self.peer = here.connect_blocking(there.address, BOUND_S)
        regions = self.peer.regions
        self.remote: list[RegionDescriptor] = [regions[f"r{i}"] for i in range(num)]
        self.tokens: list[LeaseToken] = [self.permitted(region) for region in theirs]

    @staticmethod
    def permitted(region: Region) -> LeaseToken:
        return region.grant(None, blocks=None, mode="read", ttl_s=600).token

    def read(self, to: int, of: int) -> None:
        """Reads block `of` of region `of` into region `to`."""
        self.here.read(self.mine[to], self.remote[of], [of], [of], lease=self.tokens[of]).wait(BOUND_S)
        assert (self.pages[to][of] == of + 1).all(), (to, of)

    def programs(self) -> int:
        return self.here.stats()["programs"]


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with Agent("here") as here, Agent("there") as there:
        yield Ends(here, there, request.param)


@pytest.mark.parametrize("ends", [66], indirect=True)
@pytest.mark.parametrize("most", [program_cache.MOST_PROGRAMS, 100])
def test_more_pairs_of_regions_than_programs(ends: Ends, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """66 x 66 pairs are more than a peer keeps programs."""
    monkeypatch.setattr(program_cache, "MOST_PROGRAMS", most)
    for to, of in itertools.product(range(66), repeat=2):
        ends.read(to, of)
    for to, of in ((0, 0), (65, 65), (0, 1)):
        ends.read(to, of)
    assert ends.programs() == min(66 * 66, most)
    assert ends.peer.state == "open"
    assert len(ends.there.peers) == 1


@pytest.mark.parametrize("ends", [16], indirect=True)
@pytest.mark.parametrize("most", [program_cache.MOST_PROGRAMS, 3])
def test_threads_that_compile_at_once(ends: Ends, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread's program is lost by another's, and a region that goes takes its own along and no other."""
    monkeypatch.setattr(program_cache, "MOST_PROGRAMS", most)
    interval_s = sys.getswitchinterval()
    failed: list[BaseException] = []

    def read_all(of: int) -> None:
        try:
            for to in range(8):
                ends.read(2 * to + of // 8, of)
        except BaseException as error:
            failed.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=read_all, args=(of,)) for of in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
    finally:
        sys.setswitchinterval(interval_s)
    assert not failed
    assert ends.programs() == min(16 * 8, most)
    ends.mine[0].deregister_blocking()
    assert ends.programs() == min(15 * 8, most)


@pytest.mark.parametrize("ends", [4], indirect=True)
def test_a_prepared_write_keeps_its_program(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "MOST_PROGRAMS", 1)
    target = ends.there.regions["r1"]
    target.grant(ends.there.accept_blocking("here", BOUND_S), [2], "write", ttl_s=600)
    with ends.here.command_ring(16) as ring:
        prepared = ring.prepare_write(ends.mine[3], ends.remote[1], [0], [2])
        for to, of in itertools.product(range(4), repeat=2):
            ends.read(to, of)
        assert ring.start(prepared, 0)
        ring.ended_blocking(1, BOUND_S)
        assert ring.take_failures() == []
