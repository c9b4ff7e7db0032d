"""Caches between ranks of two engines: every kind, in chunks, also with unequal tensor parallelism."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll, StateType

from tests.sglang.ranks import LLAMA, Model, Pair, Receiving, Sending, configured, end_of, hand_over
from tests.waiting import until

SUCCESS: Final = (KVPoll.Success, KVPoll.Success)

GROUPED: Final = Model(total_heads=2)
LATENT: Final = Model(is_latent=True)
WINDOW: Final = Model(states=(StateType.SWA,))
MAMBA: Final = Model(states=(StateType.MAMBA,))
INDEXED: Final = Model(is_latent=True, states=(StateType.DSA,))
HYBRID: Final = Model(states=(StateType.SWA, StateType.MAMBA))
# Heads, tensor parallelism of prefill and of decode.
SIZES: Final = ((1, 1), (1, 2), (2, 1), (2, 2))
CASES: Final = (
    *((LLAMA, *sizes) for sizes in (*SIZES, (4, 2))),
    *((GROUPED, *sizes) for sizes in ((1, 4), (4, 1), (4, 2), (2, 4))),  # heads that several ranks hold
    *((LATENT, *sizes) for sizes in SIZES),
    *((model, *sizes) for model in (WINDOW, MAMBA, INDEXED, HYBRID) for sizes in SIZES),
)


def named(case: tuple[Model, int, int]) -> str:
    model, prefill_tp, decode_tp = case
    kinds = "+".join(kind.value for kind in model.states)
    what = "latent" if model.is_latent else f"{model.total_heads} heads"
    return f"{what}{f' {kinds}' if kinds else ''} TP{prefill_tp} to TP{decode_tp}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_HOST_IP", "127.0.0.1")
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=named)
def test_decode_has_what_it_would_have_computed(
    case: tuple[Model, int, int], folder: Path, seed: int
) -> None:
    random_ = random.Random(seed)
    model, prefill_tp, decode_tp = case
    with (
        configured(folder, model.total_heads) as address,
        Pair(model, prefill_tp, decode_tp, address) as pair,
    ):
        several_arrive(pair, random_)


def several_arrive(pair: Pair, random_: random.Random) -> None:
    for _ in range(3):
        num_pages = random_.randrange(1, 12)
        sending, receiving = pair.request(random_, num_pages)
        assert hand_over(sending, receiving, random_.randrange(1, 6)) == SUCCESS
        assert receiving.differences() == []
        metric = sending.handles[0].get_transfer_metric()
        assert metric.transfer_total_bytes
        assert metric.transfer_latency_s
        assert sending.release() == receiving.release() == []
    assert pair.left() == {}


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("case", [(model, *sizes) for model in (LLAMA, LATENT) for sizes in SIZES], ids=named)
def test_each_stage_of_a_pipeline_brings_its_layers(
    case: tuple[Model, int, int], num_stages: int, folder: Path, seed: int
) -> None:
    model, prefill_tp, decode_tp = case
    with (
        configured(folder, model.total_heads) as address,
        Pair(model, prefill_tp, decode_tp, address, num_stages) as pair,
    ):
        several_arrive(pair, random.Random(seed))


@pytest.mark.parametrize("all_send", ["0", "1"], ids=["first sends", "all send"])
@pytest.mark.parametrize("case", [(model, *sizes) for model in (LLAMA, LATENT) for sizes in SIZES], ids=named)
def test_ranks_of_context_parallelism_bring_each_page_once(
    case: tuple[Model, int, int], all_send: str, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In SGLang the first of them sends everything, or each sends a share of the pages."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", all_send)
    model, prefill_tp, decode_tp = case
    with (
        configured(folder, model.total_heads) as address,
        Pair(model, prefill_tp, decode_tp, address, cp_size=2) as pair,
    ):
        several_arrive(pair, random.Random(seed))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_fails_ends_the_request_alone(stage: int, folder: Path, seed: int) -> None:
    random_ = random.Random(seed)
    with configured(folder) as address, Pair(LLAMA, 1, 1, address, 2) as pair:
        sending, receiving = pair.request(random_, 6)
        receiving.start()
        sending.start()
        until(receiving.name_pages, "sessions")
        until(sending.begin, "decode's pages at prefill")
        sending.send_chunk(3)
        sending.handles[stage].abort()
        assert end_of(sending, receiving) == (KVPoll.Failed, KVPoll.Failed)
        assert sending.release()
        assert receiving.release()
        succeed(pair, random_)
        assert pair.left() == {}


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    """A Llama between two engines of one rank each."""
    with configured(folder) as address, Pair(LLAMA, 1, 1, address) as pair:
        yield pair


def test_a_flipped_byte_is_seen(pair: Pair, seed: int) -> None:
    sending, receiving = pair.request(random.Random(seed), 5)
    assert hand_over(sending, receiving) == SUCCESS
    assert receiving.differences() == []
    pair.decode.buffers[0].kv[4][receiving.place.pages[3], 1, 2, 3] ^= 1
    assert receiving.differences() == ["rank 0: buffer 4"]


@pytest.mark.parametrize("prefix_pages", [1, 4, 6])
def test_what_decode_has_already_is_not_sent(pair: Pair, prefix_pages: int, seed: int) -> None:
    sending, receiving = pair.request(random.Random(seed), 6, prefix_pages)
    for each in pair.decode.buffers[0].kv:
        each[receiving.place.pages[:prefix_pages]] = 7
    assert hand_over(sending, receiving) == SUCCESS
    assert receiving.differences() == []
    for each in pair.decode.buffers[0].kv:
        assert (each[receiving.place.pages[:prefix_pages]] == 7).all()
    delivered = sending.handles[0].get_transfer_metric().transfer_total_bytes
    per_page = pair.prefill.managers[0].regions["kv"].layout.block_nbytes
    assert delivered == (6 - prefix_pages) * per_page + sum(pair.prefill.managers[0].kv_args.aux_item_lens)


def test_many_requests_interleave(pair: Pair, seed: int) -> None:
    random_ = random.Random(seed)
    halves = [pair.request(random_, random_.randrange(1, 8)) for _ in range(12)]
    for sending, receiving in halves:
        # Either side may be first.
        for half in random_.sample([sending, receiving], 2):
            half.start()
    waiting = list(halves)
    while waiting:
        sending, receiving = random_.choice(waiting)
        if receiving.name_pages() and sending.begin() and sending.send_chunk(random_.randrange(1, 4)):
            waiting.remove((sending, receiving))
    for sending, receiving in halves:
        assert end_of(sending, receiving) == SUCCESS
        assert receiving.differences() == []
        assert sending.release() == receiving.release() == []
    assert pair.left() == {}


def test_pages_of_other_numbers_fail_the_request_alone(pair: Pair, seed: int) -> None:
    random_ = random.Random(seed)
    sending, receiving = pair.request(random_, 6)
    sending.start()
    receiving.start()
    receiving.prefix_pages = 1  # it names one page fewer than prefill sends
    until(receiving.name_pages, "sessions")
    sending.prefix_pages = 1
    until(sending.begin, "pages")
    sending.num_sent = 0
    while not sending.send_chunk(3):
        pass
    assert end_of(sending, receiving) == (KVPoll.Failed, KVPoll.Failed)
    (reason,), (told,) = sending.release(), receiving.release()
    assert "decode named" in reason
    assert "decode named" in told or "cancelled" in told
    succeed(pair, random_)
    assert pair.left() == {}


def succeed(pair: Pair, random_: random.Random) -> tuple[Sending, Receiving]:
    """Hands one request over, as if nothing had been."""
    sending, receiving = pair.request(random_, 4)
    assert hand_over(sending, receiving) == SUCCESS
    assert receiving.differences() == []
    assert sending.release() == receiving.release() == []
    return sending, receiving


def test_caches_that_do_not_fit_are_refused_in_words(folder: Path, seed: int) -> None:
    # SGLang does not describe how tensor parallelism divides these.
    model = Model(states=(StateType.DSV4_REQUEST_STATE,))
    random_ = random.Random(seed)
    with configured(folder) as address, Pair(model, 1, 1, address) as pair:
        succeed(pair, random_)
    with configured(folder) as address, Pair(model, 1, 2, address) as pair:
        _, receiving = pair.request(random_, 3)
        receiving.start()
        until(lambda: receiving.has_ended, "the refusal")
        reasons = receiving.release()
        assert reasons
        assert all("heads of the model: 1 at" in reason for reason in reasons)


def test_memory_is_taken_from_peers_and_given_back(pair: Pair, seed: int) -> None:
    random_ = random.Random(seed)
    succeed(pair, random_)
    manager = pair.decode.managers[0]
    manager.deregister_buffer_to_engine()
    assert manager.agent.regions == {}
    manager.register_buffer_to_engine()
    succeed(pair, random_)
