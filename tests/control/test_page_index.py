"""Keys, slots, pins, quotas, and the order of eviction."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvxfer.control.host_pool.page import MAX_KEY_NBYTES, Page, PageKey, PageState
from kvxfer.control.host_pool.page_index import PageIndex
from kvxfer.errors import ExhaustedError, UsageError

PAGE = 10


def keys(names: str, tenant: str = "a", layout: str = "L") -> list[PageKey]:
    return [PageKey(tenant, "model", "1", layout, name) for name in names]


def names(found: list[PageKey]) -> str:
    return "".join(key.key for key in found)


def park(index: PageIndex, wanted: list[PageKey], now: float) -> str:
    """Parks at once, and returns the evicted pages."""
    reserved = index.reserve(wanted, PAGE, now)
    index.commit(reserved.pages, now)
    return names(reserved.evicted)


def test_the_least_recently_used_gives_way_first() -> None:
    index = PageIndex(1, 40)
    park(index, keys("abcd"), 0)
    index.release(index.hold(keys("a"), 1)[0], 1)  # read
    index.reserve(keys("b"), PAGE, 2)  # parked again
    assert park(index, keys("ef"), 3) == "cd"
    assert park(index, keys("g"), 4) == "a"


def test_neither_what_is_pinned_nor_what_is_held_gives_way() -> None:
    index = PageIndex(1, 40)
    park(index, keys("abcd"), 0)
    assert index.pin(keys("ax")) == keys("a")
    held, _ = index.hold(keys("b"), 1)
    assert park(index, keys("e"), 2) == "c"
    with pytest.raises(ExhaustedError, match="do not fit"):
        index.reserve(keys("fgh"), PAGE, 3)
    assert index.find(keys("d")[0]) is not None, "nothing gives way for what does not fit"
    index.release(held, 4)
    index.pin(keys("a"), False)
    assert park(index, keys("fghi"), 5) == "deba"


def test_a_slab_of_another_layout_gives_way_when_its_newest_page_is_older() -> None:
    index = PageIndex(2, 40)
    park(index, keys("abcd"), 0)
    park(index, keys("efgh", layout="K"), 1)
    index.release(index.hold(keys("a"), 2)[0], 2)
    reserved = index.reserve(keys("i"), PAGE, 3)
    assert names(reserved.evicted) == "b", "it is older than the newest of the other slab"
    assert index.layouts == {"L": 1, "K": 1}
    index.commit(reserved.pages, 3)
    index.release(index.hold(keys("cd"), 4)[0], 4)
    index.release(index.hold(keys("ai"), 5)[0], 5)
    reserved = index.reserve(keys("j"), PAGE, 6)
    assert names(reserved.evicted) == "efgh"
    assert index.layouts == {"L": 2}
    # An empty slab is used before any page is evicted.
    index.abort(reserved.pages)
    reserved = index.reserve(keys("k", layout="M"), PAGE, 7)
    assert not reserved.evicted
    assert index.layouts == {"L": 1, "M": 1}


def test_a_quota_is_kept_by_the_tenants_own_pages_and_by_no_others() -> None:
    index = PageIndex(1, 80, quotas={"a": 30}, quota_nbytes=50)
    park(index, keys("x", tenant="b"), 0)
    park(index, keys("abc"), 1)
    assert park(index, keys("d"), 2) == "a"
    index.pin(keys("bcd"))
    with pytest.raises(ExhaustedError, match="quota of tenant 'a'"):
        index.reserve(keys("e"), PAGE, 3)
    index.set_quota("a", None)
    assert park(index, keys("ef"), 4) == ""
    index.set_quota("a", 0)
    with pytest.raises(ExhaustedError):
        index.reserve(keys("g"), PAGE, 5)
    assert index.tenants_nbytes() == {"a": 50, "b": 10}


def test_pages_that_are_being_filled_are_of_their_tenants_quota_and_give_way_to_none() -> None:
    index = PageIndex(1, 80, quotas={"a": 30})
    filling = index.reserve(keys("abc"), PAGE, 0).pages
    with pytest.raises(ExhaustedError, match="quota of tenant 'a'"):
        index.reserve(keys("d"), PAGE, 1)
    index.set_quota("a", 10)  # applies from the next parking on
    index.commit(filling, 2)
    assert index.stats().used_nbytes == 30
    assert park(index, keys("d"), 3) == "abc"
    index.set_quota("a", 20)
    filling = index.reserve(keys("e"), PAGE, 4).pages
    assert park(index, keys("f"), 5) == "d"
    index.abort(filling)
    assert park(index, keys("e"), 6) == ""


def test_half_of_the_pool_may_be_pinned() -> None:
    index = PageIndex(1, 40)
    park(index, keys("abcd"), 0)
    index.pin(keys("ab"))
    index.pin(keys("ab"))
    with pytest.raises(ExhaustedError, match="pinned"):
        index.pin(keys("cd"))
    assert index.stats().pinned_nbytes == 20
    index.drop(keys("a"))
    assert index.pin(keys("c")) == keys("c")


def test_what_is_dropped_while_it_is_held_keeps_its_place_until_the_last_lets_go() -> None:
    index = PageIndex(1, 20)
    park(index, keys("ab"), 0)
    first, _ = index.hold(keys("a"), 1)
    second, _ = index.hold(keys("a"), 1)
    (page,) = index.drop(keys("a"))
    assert page.state is PageState.DROPPED
    assert index.find(page.key) is None
    assert index.pages() != [page]
    assert park(index, keys("a"), 2) == "b", "the same key is another page, at another place"
    index.release(first, 3)
    with pytest.raises(ExhaustedError):
        index.reserve(keys("bc"), PAGE, 4)
    index.release(second, 5)
    assert park(index, keys("b"), 6) == ""


def test_pages_are_listed_in_pieces_in_the_order_of_their_parking() -> None:
    index = PageIndex(40, 100)
    for number in range(300):
        park(index, keys(str(number % 10), tenant=f"t{number // 10}"), number)
    index.drop([page.key for page in index.pages(most=200)])
    first = index.pages(most=30)
    assert [page.serial for page in first] == list(range(201, 231))
    assert [page.serial for page in index.pages(after=230)] == list(range(231, 301))
    assert [page.key.key for page in index.pages("t25", most=3)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("wanted", "page_nbytes"),
    [
        (keys("aa"), PAGE),
        ([*keys("a"), *keys("a", tenant="b")], PAGE),
        ([*keys("a"), *keys("a", layout="K")], PAGE),
        (keys("a"), 41),
        ([keys("a")[0]._replace(key="")], PAGE),
        ([keys("a")[0]._replace(key="x" * (MAX_KEY_NBYTES + 1))], PAGE),
        (keys("a", tenant="\ud800" * MAX_KEY_NBYTES), PAGE),
    ],
)
def test_what_cannot_be_parked_is_refused(wanted: list[PageKey], page_nbytes: int) -> None:
    index = PageIndex(1, 40)
    with pytest.raises(UsageError):
        index.reserve(wanted, page_nbytes, 0)
    assert index.stats().used_nbytes == 0


SIZES = {"L": PAGE, "K": 7, "M": 13}


def test_its_books_are_right_whatever_happens(seed: int) -> None:
    """Each slot is given once, and the figures equal a recount."""
    chance = random.Random(seed)
    index = PageIndex(4, 40, quotas={"b": 60}, max_pinned_nbytes=50)
    parking: list[list[Page]] = []
    held: list[list[Page]] = []
    for now in range(3000):
        tenant, layout = chance.choice("abc"), chance.choice("LKM")
        some = keys("".join(chance.sample("abcdefgh", chance.randint(1, 4))), tenant, layout)
        try:
            match chance.randrange(7):
                case 0 | 1:
                    parking.append(index.reserve(some, SIZES[layout], now).pages)
                case 2:
                    if parking:
                        index.commit(parking.pop(chance.randrange(len(parking))), now)
                case 3:
                    if parking:
                        index.abort(parking.pop(chance.randrange(len(parking))))
                case 4:
                    held.append(index.hold(some, now)[0])
                case 5:
                    if held:
                        index.release(held.pop(chance.randrange(len(held))), now)
                case 6:
                    index.drop(some) if chance.random() < 0.3 else index.pin(some, chance.random() < 0.4)
        except ExhaustedError:
            pass
        _check_books(index, [page for group in [*parking, *held] for page in group])
    for group in parking:
        index.abort(group)
    for group in held:
        index.release(group, 3000)
    index.drop([page.key for page in index.pages()])
    assert index.stats().used_nbytes == index.stats().pinned_nbytes == index.stats().num_held == 0
    assert not index.tenants_nbytes()
    assert not index._idle._of_layout
    assert not index._idle._of_tenant
    assert not index._by_serial


def _check_books(index: PageIndex, busy: list[Page]) -> None:
    pages = {*index._pages.values(), *busy}  # dropped pages that are still held are only in the latter
    taken = Counter(byte for page in pages for byte in _bytes_of(page))
    assert not taken or max(taken.values()) == 1, "no two pages, of whichever layouts, have one byte"
    assert index.stats().used_nbytes == len(taken)
    used: Counter[str] = Counter()
    for page in pages:
        used[page.key.tenant] += page.nbytes
    assert index.tenants_nbytes() == used
    for slab in index._slabs._all:
        inside = [page for page in pages if page.slab == slab.number]
        assert slab.num_pages == len(inside)
        assert slab.num_busy == sum(not page.is_idle for page in inside)
        assert not slab.layout or len(slab.free) + len(inside) == slab.num_blocks
        assert {page.key.layout for page in inside} <= {slab.layout}
    idle = {page for page in pages if page.is_idle}
    for orders in (index._idle._of_layout, index._idle._of_tenant):
        assert {page for order in orders.values() for page in order} == idle
    assert index.stats().pinned_nbytes == sum(page.nbytes for page in pages if page.is_pinned)
    assert index.layouts == Counter(slab.layout for slab in index._slabs._all if slab.layout)


def _bytes_of(page: Page) -> range:
    return range(page.block * page.nbytes, (page.block + 1) * page.nbytes)
