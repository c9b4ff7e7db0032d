import random

import numpy as np

from kvxfer.bench.handover.prefix_cache import PrefixCache
from kvxfer.bench.handover.request_pages import Prefix
from kvxfer.bench.work.page_data import Indices, Words


def contents(*values: int) -> Words:
    return np.array(values, dtype=np.uint64)


def blocks(*values: int) -> Indices:
    return np.array(values, dtype=np.uint32)


def test_longest_beginning_is_found_and_no_later_part() -> None:
    cache = PrefixCache(10)
    assert cache.give_back(contents(1, 2, 3), blocks(7, 8, 9), 0) == []
    assert cache.take(contents(1, 2, 5)) == [7, 8]
    assert cache.take(contents(4, 2, 3)) == []


def test_what_goes_first_is_unused_and_follows_others() -> None:
    cache = PrefixCache(1)
    assert cache.give_back(contents(1, 2), blocks(7, 8), 0) == [8]
    assert cache.take(contents(1)) == [7]
    # In use: what is new goes.
    assert cache.give_back(contents(2, 3), blocks(8, 9), 0) == [9]
    # Another request brought it first.
    assert cache.give_back(contents(1), blocks(5), 0) == [5]


def test_random_requests_neither_lose_nor_share_a_block(seed: int) -> None:
    generator = random.Random(seed)
    capacity, cache = 12, PrefixCache(12)
    free = list(range(60))
    running: list[tuple[Words, Indices, int]] = []
    for _ in range(3000):
        if len(running) < 4 and generator.random() < 0.6:
            # Contents name all that is before them, as hash ids do.
            path = [generator.randrange(3) for _ in range(generator.randint(1, 10))]
            wanted = contents(*(int("1" + "".join(map(str, path[: i + 1]))) for i in range(len(path))))
            taken = cache.take(wanted)
            mine = [free.pop() for _ in range(len(wanted) - len(taken))]
            running.append((wanted, blocks(*taken, *mine), len(taken)))
        elif running:
            freed = cache.give_back(*running.pop(generator.randrange(len(running))))
            assert not set(freed) & set(free)
            assert len(set(freed)) == len(freed)
            for _, held, _ in running:
                assert not set(freed) & set(held.tolist())
            free += freed
    for one in running:
        free += cache.give_back(*one)
    assert 60 - len(free) <= capacity
    assert len(set(free)) == len(free)


def test_equal_ids_are_equal_blocks_and_the_rest_is_the_requests_own() -> None:
    first = Prefix((1, 2), chunk_blocks=3).contents(10, 8)
    second = Prefix((1, 5), chunk_blocks=3).contents(11, 8)
    assert (first[:3] == second[:3]).all()
    assert len(np.unique(np.concatenate([first, second]))) == 13
    assert (Prefix((1, 2), chunk_blocks=3).contents(12, 4) == first[:4]).all()
