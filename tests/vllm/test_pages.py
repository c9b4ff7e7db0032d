"""Pages arrive as they were sent, only missing pages move, and no blocks stay held."""

from __future__ import annotations

from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK
from tests.vllm.engine import FLIP, Engines, random_prompt
from tests.vllm.handover import told_in


def test_pages_arrive_as_they_left(engines: Engines) -> None:
    prompt = random_prompt(300)
    params = engines.prefilled(prompt, "hashes")
    engines.decoded(prompt, "hashes", params)
    sent, received = (
        told_in(engines.observed / f"{params['remote_request_id']}.{what}")["hashes"]
        for what in ("sent", "received")
    )
    assert sent == received
    assert [len(set(map(tuple, hashes))) for hashes in sent] == [-(-300 // TOKENS_PER_BLOCK)]


def test_a_flipped_exponent_changes_the_tokens(engines: Engines) -> None:
    prompt = random_prompt(100)
    expected = engines.expected(prompt)
    flip = engines.observed / FLIP
    flip.touch()
    try:
        params = engines.prefilled(prompt, "flipped")
        assert engines.decoded(prompt, "flipped", params).token_ids != expected
    finally:
        flip.unlink()


def test_a_prompt_that_decode_holds_whole_is_given_back_at_prefill(engines: Engines) -> None:
    prompt = random_prompt(3 * TOKENS_PER_BLOCK)
    for request_id in ("whole", "whole again"):
        params = engines.prefilled(prompt, request_id)
        assert engines.decoded(prompt, request_id, params).token_ids == engines.expected(prompt)
    engines.wait_empty()


def test_a_request_that_decode_ends_early_is_given_back_at_prefill(engines: Engines) -> None:
    prompt = random_prompt(200)
    params = engines.prefilled(prompt, "early")
    assert len(engines.decoded(prompt, "early", params, max_tokens=1).token_ids) == 1
    engines.wait_empty()
