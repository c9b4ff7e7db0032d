"""Which kept requests give way to others: the ones that no engine has claimed, the oldest first."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic")

from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.keeping import Keeping
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.step import News
from tests.connectors.requests import Request

BLOCK_SIZE, NUM_BLOCKS = 16, 100


class Kept:
    """Requests of ten blocks each, kept one second after the other."""

    def __init__(self, count: int = 3, is_return: bool = False, **settings: Any) -> None:
        self.now = 0.0
        group = CacheGroup(0, "kv.0", (), BLOCK_SIZE)
        self.keeping = Keeping([group], NUM_BLOCKS, Settings(**settings), lambda: self.now)
        for number in range(count):
            self.now += 1.0
            blocks = list(range(10 * number + 1, 10 * number + 11))
            self.keeping.begin(f"{number}", [blocks], is_return=is_return)
            assert not self.keeping.give_way()

    def gives_way(self, num_blocks: int) -> list[str]:
        """Returns the requests that give way in a step in which a request waits for so many blocks."""
        self.keeping.asked(Request([0] * (num_blocks * BLOCK_SIZE)))
        return self.keeping.give_way()


def test_who_waits_for_blocks_has_those_of_the_oldest() -> None:
    kept = Kept()
    kept.now += 10.0
    assert kept.gives_way(10) == ["0"]
    # The blocks come back in the next steps; until then no other request gives way for them.
    assert kept.gives_way(10) == []
    kept.keeping.end({"0"})
    assert kept.gives_way(11) == ["1", "2"]


def test_who_gets_its_blocks_waits_for_none() -> None:
    kept = Kept()
    kept.now += 10.0
    request = Request([0] * BLOCK_SIZE)
    kept.keeping.asked(request)
    kept.keeping.allocated(request)
    assert not kept.keeping.give_way()
    # A request that waited in an earlier step and is gone does not count either.
    assert kept.gives_way(1) == ["0"]
    kept.keeping.end({"0"})
    assert not kept.keeping.give_way()


def test_a_router_has_time_to_ask_decode() -> None:
    kept = Kept(claim_within_s=2.0)
    assert kept.gives_way(100) == ["0"]  # it is 2 s old; the others are only 1 s old


def test_who_is_claimed_stays(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    kept.keeping.heard(News(frozenset({"0", "another"})))
    kept.now += 10.0
    assert kept.gives_way(1) == ["1"]
    assert "request 1: no engine has asked for its cache for 11.0 s" in caplog.text
    kept.keeping.end({"1"})
    assert kept.gives_way(100) == ["2"]


def test_who_was_read_and_may_be_shared_goes_where_others_need_it(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(claim_within_s=1000.0)
    claims, reads = News(frozenset("01")), News(read=("0",))
    kept.keeping.heard(claims, 2)
    kept.keeping.heard(reads, 2)
    assert not kept.gives_way(100)  # the other worker's reader may still read
    kept.keeping.heard(claims | reads, 2)
    assert not kept.keeping.give_way()  # no request waits
    assert kept.gives_way(100) == ["0"]
    assert not caplog.records
    # A request that is claimed again stays.
    kept = Kept(claim_within_s=1000.0)
    kept.keeping.heard(News(frozenset("0"), read=("0", "0")), 2)
    kept.keeping.heard(claims, 2)
    assert not kept.gives_way(100)


@pytest.mark.parametrize(
    ("is_return", "settings"),
    [(False, {"keep_share": 0.2}), (True, {"return_share": 0.2})],
)
def test_no_more_is_kept_on_trust_than_the_user_lets(is_return: bool, settings: dict[str, Any]) -> None:
    settings["claim_within_s"] = 10.0
    kept = Kept(3, is_return, **settings)
    kept.now += 10.0
    assert kept.keeping.give_way() == ["0"]
    assert not kept.keeping.give_way()
    # Claimed requests do not count.
    kept = Kept(3, is_return, **settings)
    kept.keeping.heard(News(frozenset({"1"})))
    kept.now += 10.0
    assert not kept.keeping.give_way()


def test_a_request_that_is_computed_waits_for_what_comes_back_soon() -> None:
    kept = Kept()
    kept.keeping.heard(News(frozenset("012"), frozenset("1")))
    assert kept.keeping.frees_soon()
    # A read takes less than a second, but blocks that are only claimed may stay long.
    kept.now += 1.0
    assert not kept.keeping.frees_soon()


def test_a_request_that_is_computed_has_blocks_of_who_gives_way() -> None:
    kept = Kept()
    kept.now += 10.0
    assert kept.keeping.frees_soon()
    assert kept.keeping.give_way() == ["0"]
    assert kept.keeping.frees_soon()
    kept.keeping.end({"0"})
    kept.keeping.heard(News(frozenset("12")))
    assert not kept.keeping.frees_soon()
