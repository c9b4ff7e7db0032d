"""Later turns: prefill fetches the tokens that decode added, and computes only the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK, Completion, complete
from tests.vllm.engine import TO_PREFILL, Engines, random_prompt

NUM_DECODED = 100


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_held(engines: Engines) -> Iterator[None]:
    """Blocks that no turn fetched are given back at their deadline; waits once for all turns."""
    yield
    engines.wait_empty(30)


def first_turn(engines: Engines, prompt: str) -> Completion:
    """Hands a prompt over, and asks decode to keep the tokens that it adds."""
    params = engines.prefilled(prompt, "turn 1")
    return engines.decoded(prompt, "turn 1", {**params, "do_remote_decode": True}, NUM_DECODED)


def next_turn(engines: Engines, tokens: list[int], params: dict[str, Any]) -> Completion:
    """Passes the parameters of decode's answer to prefill unchanged, as a router does."""
    return complete(engines.prefill, tokens, 1, kv_transfer_params=params)


def test_prefill_fetches_what_decode_has_added(engines: Engines) -> None:
    prompt = random_prompt(200)
    turn = first_turn(engines, prompt)
    assert turn.token_ids == engines.expected(prompt, NUM_DECODED)
    assert turn.kv_transfer_params
    tokens = turn.prompt_token_ids + turn.token_ids + list(random_prompt(60, seed=2).encode())
    moved = engines.prefill.prompt_tokens("external_kv_transfer")
    answer = next_turn(engines, tokens, turn.kv_transfer_params)
    # Its prefix cache has whole blocks of the first prompt; decode has everything except the last token's
    # cache.
    moved = engines.prefill.prompt_tokens("external_kv_transfer") - moved
    assert moved == 200 + NUM_DECODED - 1 - 200 // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    # Then its cache goes to decode as usual, and decode answers as one engine does.
    assert answer.kv_transfer_params
    alone = complete(engines.alone, tokens).token_ids
    assert engines.decoded(tokens, "turn 2", answer.kv_transfer_params).token_ids == alone  # type: ignore[arg-type]


def test_what_prefill_fetched_is_what_it_computes_with(engines: Engines) -> None:
    # A page that is overwritten between the turns changes prefill's answer.
    prompt = random_prompt(64)
    turn = first_turn(engines, prompt)
    assert turn.kv_transfer_params
    tokens = turn.prompt_token_ids + turn.token_ids
    flip = engines.observed / "flip"
    flip.touch()
    try:
        changed = complete(engines.prefill, tokens, 24, kv_transfer_params=turn.kv_transfer_params)
    finally:
        flip.unlink()
    assert changed.token_ids != complete(engines.alone, tokens, 24).token_ids
    engines.prefill.client.post("/reset_prefix_cache").raise_for_status()


def test_a_turn_that_goes_on_in_another_way_is_computed(engines: Engines) -> None:
    turn = first_turn(engines, random_prompt(100))
    assert turn.kv_transfer_params
    tokens = turn.prompt_token_ids + turn.token_ids
    tokens[120] ^= 1
    moved = engines.prefill.prompt_tokens("external_kv_transfer")
    answer = next_turn(engines, tokens, turn.kv_transfer_params)
    assert answer.token_ids == complete(engines.alone, tokens, 1).token_ids
    assert engines.prefill.prompt_tokens("external_kv_transfer") == moved


def test_parameters_of_another_kind_fail_no_turn(engines: Engines) -> None:
    for absurd in ({"remote_block_ids": [[1]]}, {"remote_block_ids": 7, "kvxfer": {"version": 1}}):
        tokens = list(random_prompt(50).encode())
        answer = next_turn(engines, tokens, {**TO_PREFILL, **absurd})
        assert answer.token_ids == complete(engines.alone, tokens, 1).token_ids


def test_a_turn_that_never_comes_holds_nothing(engines: Engines) -> None:
    assert first_turn(engines, random_prompt(100)).kv_transfer_params
    engines.wait_empty(30)
