"""Both engines are asked at once: prefill writes its layers into decode's blocks as it computes them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvxfer.bench.engines.server_process import RouterServer
from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK, complete, completion_request
from kvxfer.bench.errors import BenchError
from kvxfer.directory import Entry
from tests.vllm.engine import FLIP, TO_PREFILL, Engines, Ranks, random_prompt
from tests.vllm.handover import told_in

RANK = Entry("a", "tcp://127.0.0.1:1", bytes(16)).to_dict()


@pytest.fixture(scope="module")
def ranks(engines: Engines) -> Ranks:
    return engines.ranks()


@pytest.fixture(scope="module")
def router(engines: Engines) -> Iterator[RouterServer]:
    """A router that asks both at once."""
    log = engines.observed.parent / "concurrent-router.log"
    with RouterServer([engines.prefill.url], [engines.decode.url], log, "concurrent") as router:
        router.wait_ready()
        # The answer to the first request contains the addresses of prefill's agents.
        complete(router, random_prompt(10), 1)
        yield router


@pytest.mark.parametrize("num_tokens", [1, TOKENS_PER_BLOCK, 70, 900])
@pytest.mark.parametrize("later", ["neither", "prefill", "decode"])
def test_tokens_are_those_of_one_engine(engines: Engines, ranks: Ranks, num_tokens: int, later: str) -> None:
    prompt = random_prompt(num_tokens)
    moved = engines.decode.prompt_tokens("external_kv_transfer")
    answer = engines.pushed(
        prompt, ranks, prefill_waits_s=0.3 * (later == "prefill"), decode_waits_s=0.3 * (later == "decode")
    )
    assert answer.token_ids == engines.expected(prompt)
    assert engines.decode.prompt_tokens("external_kv_transfer") - moved >= num_tokens - 1


def test_pages_arrive_as_they_left(engines: Engines, ranks: Ranks) -> None:
    key = secrets.token_hex(16)
    engines.pushed(random_prompt(300), ranks, key=key)
    sent, received = (told_in(engines.observed / f"{key}.{what}")["hashes"] for what in ("sent", "received"))
    assert sent == received
    assert [len(set(map(tuple, hashes))) for hashes in sent] == [-(-300 // TOKENS_PER_BLOCK)]


def test_a_flipped_exponent_changes_the_tokens(engines: Engines, ranks: Ranks) -> None:
    prompt = random_prompt(100)
    flip = engines.observed / FLIP
    flip.touch()
    try:
        assert engines.pushed(prompt, ranks).token_ids != engines.expected(prompt)
    finally:
        flip.unlink()


def test_only_what_decode_lacks_moves(engines: Engines, ranks: Ranks) -> None:
    beginning = random_prompt(8 * TOKENS_PER_BLOCK)
    engines.pushed(beginning, ranks)
    prompt = beginning + random_prompt(100)
    moved = engines.decode.prompt_tokens("external_kv_transfer")
    assert engines.pushed(prompt, ranks).token_ids == engines.expected(prompt)
    assert 0 < engines.decode.prompt_tokens("external_kv_transfer") - moved <= 100
    # Decode has the whole prompt: it tells prefill that no reader waits for its pages.
    assert engines.pushed(prompt[:-100], ranks).token_ids == engines.expected(prompt[:-100])
    engines.wait_empty()


def test_many_at_once_through_a_router(engines: Engines, router: RouterServer) -> None:
    keys = len(list(engines.observed.glob("*.received")))
    prompts = [random_prompt(40 + 61 * number) for number in range(12)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: complete(router, prompt).token_ids, prompts))
    assert answers == [engines.expected(prompt) for prompt in prompts]
    names = [path.stem for path in engines.observed.glob("*.received")]
    assert len(names) - keys == len(prompts)
    assert sum(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in names) >= len(prompts)
    engines.wait_empty()


def test_blocks_that_nobody_wants_come_back(engines: Engines) -> None:
    params = {**TO_PREFILL, "kvxfer": {"version": 1, "push": secrets.token_hex(16)}}
    complete(engines.prefill, random_prompt(200), 1, kv_transfer_params=params)
    assert engines.prefill.metric("vllm:kv_cache_usage_perc") > 0
    engines.wait_empty(30)


def test_another_prompt_is_refused_at_once(engines: Engines, ranks: Ranks) -> None:
    own = {"version": 1, "push": secrets.token_hex(16)}
    complete(engines.prefill, random_prompt(100), 1, kv_transfer_params={**TO_PREFILL, "kvxfer": own})
    params = {"do_remote_prefill": True, "kvxfer": {**own, "ranks": ranks}}
    with pytest.raises(BenchError, match="answered 500"):
        complete(engines.decode, random_prompt(100, seed=2), kv_transfer_params=params)
    assert "prefill refused: decode has another prompt" in engines.decode.log.read_text(errors="replace")
    engines.wait_empty()


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_clients_that_go_away_leave_nothing_behind(engines: Engines, ranks: Ranks, who: str) -> None:
    def ask(url: str, prompt: str, params: dict[str, Any], timeout_s: float) -> int:
        request = completion_request(prompt, 1, kv_transfer_params=params)
        try:
            return httpx.post(f"{url}/v1/completions", timeout=timeout_s, **request).status_code
        except httpx.TimeoutException:
            return 499

    # All at once, and of a length that decode has room for all. Decode waits `push_timeout_s` for a prefill
    # that was never asked, and a request without room would wait for the same time again.
    with ThreadPoolExecutor(20) as threads:
        asked: dict[str, list[Future[int]]] = {"prefill": [], "decode": []}
        for at in range(10):
            own = {"version": 1, "push": secrets.token_hex(16)}
            prompt = random_prompt(700, seed=at)
            patience = {"prefill": 60.0, "decode": 60.0, who: 0.005 + 0.01 * at}
            to_prefill = {**TO_PREFILL, "kvxfer": own}
            to_decode = {"do_remote_prefill": True, "kvxfer": {**own, "ranks": ranks}}
            for side, server, params in (
                ("prefill", engines.prefill, to_prefill),
                ("decode", engines.decode, to_decode),
            ):
                asked[side].append(threads.submit(ask, server.url, prompt, params, patience[side]))
        answers = {side: [answer.result() for answer in of_side] for side, of_side in asked.items()}
    assert 499 in answers[who], "nobody went away"
    if who == "decode":
        assert set(answers["prefill"]) == {200}
    engines.wait_empty(30)
    prompt = random_prompt(100)
    assert engines.pushed(prompt, ranks).token_ids == engines.expected(prompt)


ABSURD: list[dict[str, Any]] = [
    {"version": 1, "push": "short", "ranks": [RANK]},
    {"version": 2, "push": "0" * 32, "ranks": [RANK]},
    {"version": 1, "push": "0" * 32},
    {"version": 1, "push": "0" * 32, "ranks": []},
    {"version": 1, "push": "0" * 32, "ranks": [RANK] * 65},
    {"version": 1, "push": "0" * 32, "ranks": [{**RANK, "address": "http://user@127.0.0.1:1"}]},
    {"version": 1, "push": "0" * 32, "ranks": [RANK]},
    {"version": 1, "push": ["0"] * 32, "ranks": 7},
]


@pytest.mark.parametrize("own", ABSURD)
def test_absurd_parameters_fail_their_request_alone(
    engines: Engines, ranks: Ranks, own: dict[str, Any]
) -> None:
    prompt = random_prompt(50)
    params = {"do_remote_prefill": True, "kvxfer": own}
    with pytest.raises(BenchError, match="answered 500"):
        complete(engines.decode, prompt, kv_transfer_params=params)
    # Prefill computes the prompt and answers with its token.
    answer = complete(engines.prefill, prompt, 1, kv_transfer_params={**TO_PREFILL, "kvxfer": own})
    assert answer.token_ids == engines.expected(prompt, 1)
    assert engines.pushed(prompt, ranks).token_ids == engines.expected(prompt)
