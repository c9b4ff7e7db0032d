"""Parameters that a router or a client may send: whatever their types and values, they end no engine."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer import LeaseToken
from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.handover import Handover, prompt_digest
from kvxfer.connectors.common.scheduler_half import SchedulerHalf
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.step import OwnRank
from kvxfer.directory import Entry
from tests.connectors.requests import Request
from tests.connectors.workers import BLOCK_SIZE, LAYERS, Worker, workers
from tests.waiting import until

NUM_TOKENS = 100
BLOCKS = [[1, 2, 3, 4]]
TOKENS = list(range(NUM_TOKENS))
GROUP = CacheGroup(0, "kv.0", LAYERS, BLOCK_SIZE)
RANK = Entry("p/0.1", "tcp://127.0.0.1:1", bytes(16))
PULL = Handover(
    "cmpl-1", (RANK,), (LeaseToken.draw(),), ((7, 9, 0, 4),), (BLOCK_SIZE,), (1,), NUM_TOKENS, keep_s=30.0
).params("engine", Request(TOKENS))
PUSH = {"version": 1, "push": "ab" * 16, "ranks": [RANK.to_dict()]}
COORDINATES = {
    "remote_engine_id": "p",
    "remote_request_id": "1",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
VALID: list[dict[str, Any]] = [
    PULL,
    {**PULL, "do_remote_prefill": False, "do_remote_decode": True},
    {"do_remote_prefill": True, "kvxfer": PUSH},
    {"do_remote_prefill": True, "tp_size": 1, "pp_size": 1, **COORDINATES},
    {"do_remote_decode": True, "kvxfer": {"version": 1, "reader": "d", "readers": ["e"]}},
    {"do_remote_decode": True, "kvxfer": PUSH},
    {"do_remote_decode": True, "do_remote_prefill": True, **PULL},
]
NESTED: list[Any] = []
for _ in range(300):
    NESTED = [NESTED]
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**200, 0.5, math.inf, math.nan, "", "x", "1"),
    *(
        "*",
        "a*b/*",
        "\0",
        "\ud800",
        "x" * 100_000,
        "tcp://\ud800:1",
        b"\xff",
        [],
        [[]],
        [None],
        (1,),
        {},
        {"\ud800": 1},
        {7: 7},
    ),
    *([["\ud800"]], [-1], [2**70], NESTED, object()),
]


def drawn(random_: random.Random) -> Any:
    """Returns valid parameters of some kind, with a few fields replaced, removed or added at any depth."""
    if random_.random() < 0.15:
        return random_.choice(JUNK)
    params = copy.deepcopy(random_.choice(VALID))
    for _ in range(random_.randint(1, 3)):
        place: Any = params
        while True:
            key = random_.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or random_.random() < 0.4:
                break
            place = place[key]
        if isinstance(place, dict) and random_.random() < 0.3:
            place.pop(key)
            place[random_.choice(["x", "\ud800", 7])] = random_.choice(JUNK)
            place = params = {**params}
        else:
            place[key] = random_.choice(JUNK)
    return params


@pytest.fixture(scope="module")
def decode() -> Iterator[Worker]:
    with workers("decode") as (worker,):
        yield worker


@pytest.mark.parametrize("seed", range(60), indirect=True)
def test_they_end_no_engine(decode: Worker, seed: int) -> None:
    random_ = random.Random(seed)
    for at in range(20):
        settings = Settings(mode=random_.choice(["pull", "push"]), require_transfer=random_.random() < 0.5)
        half = SchedulerHalf("decode", True, True, (CacheGroup(0, "kv.0", LAYERS, BLOCK_SIZE),), 64, settings)
        half.set_ranks({(0, 0): OwnRank(decode.rank, (1,))})
        name = f"{seed}-{at}"
        batch = random_.choice([None, ("cmpl-1", 0), ("cmpl-1", 1)])
        request = Request([*TOKENS], name, drawn(random_), batch=batch)
        request.family = random_.choice([None, "f"])
        request.was_refused = random_.random() < 0.1
        shown = repr(request.params)[:300]
        try:
            half.arrived(request)
            count = half.num_external_tokens(request, 0)
            half.allocated(request, BLOCKS, count or 0)
            if random_.random() < 0.8:
                step = half.step({name: NUM_TOKENS}, (), lambda _: BLOCKS)
                decode.half.before_forward(step)
                decode.half.step(step)
                decode.half.after_forward(whole=True)
            _, told = half.finished(request, BLOCKS, random_.random() < 0.5)
            assert told is None or prompt_digest(request, NUM_TOKENS)
            last = half.step({}, (), lambda _: None)
            decode.half.before_forward(last)
            decode.half.step(last)
            decode.half.collect({name})
        except Exception as error:
            raise AssertionError(f"{shown} ended the engine") from error
    until(lambda: not decode.half.collect(set()).received and not fetching(decode), "the end of all fetches")


def fetching(decode: Worker) -> bool:
    assert decode.half._fetches is not None
    return bool(decode.half._fetches._fetches)


@pytest.mark.parametrize(
    ("kind", "batch", "is_named"),
    [
        (0, None, True),
        (1, None, True),
        (2, ("cmpl-1", 0), True),
        # The key of these pushes follows from the prompt.
        (3, ("cmpl-1", 0), False),
        (0, ("cmpl-1", 1), False),
        (2, ("cmpl-1", 1), False),
    ],
)
def test_a_refused_request_is_declined_without_a_complaint(
    decode: Worker, kind: int, batch: tuple[str, int] | None, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    half = SchedulerHalf("decode", True, True, (GROUP,), 64, Settings())
    half.set_ranks({(0, 0): OwnRank(decode.rank, (1,))})
    # The engine tells of one token in place of the prompt.
    request = Request([0], "a", copy.deepcopy(VALID[kind]), batch=batch, was_refused=True)
    half.arrived(request)
    assert half.finished(request, [[]], is_whole=False) == (False, None)
    step = half.step({}, (), lambda _: None)
    assert not step.claimed
    assert [rank for source in step.released for rank in source.ranks] == [RANK] * is_named
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]
