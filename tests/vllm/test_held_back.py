"""Requests of the engine's own class, and what of them prefill leaves to decode."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvxfer.connectors.vllm.cache_groups import CacheGroup
from kvxfer.connectors.vllm.held_back import hold_back, num_held_back

BLOCK_SIZE = 4
init_none_hash(sha256)


def request_of(tokens: list[int] | None, max_tokens: int = 16, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **fields.pop("sampling", {}))
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request("request", tokens, sampling, None, block_hasher=hasher, **fields)


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 5, 7, 8, 9, 12, 13])
def test_a_shortened_request_is_the_shorter_one(num_tokens: int) -> None:
    tokens = list(range(num_tokens))
    request, shorter = request_of(tokens), request_of(tokens[:-1])
    assert hold_back(request, 1)
    assert request.num_prompt_tokens == request.num_tokens == num_tokens - 1
    assert request.prompt_token_ids == tokens[:-1] == list(request.all_token_ids)
    assert request.block_hashes == shorter.block_hashes
    assert request.max_tokens == 1
    # The front end answers with the prompt that it was asked with.
    assert tokens == list(range(num_tokens))
    for each in (request, shorter):
        each.append_output_token_ids(99)
    assert request.block_hashes == shorter.block_hashes


@pytest.mark.parametrize(
    "request_",
    [
        request_of([7]),
        request_of([7, 8], sampling={"prompt_logprobs": 1}),
        request_of([7, 8], resumable=True),
    ],
    ids=["nothing would be left", "decode computes all of it", "it goes on later"],
)
def test_what_cannot_be_shortened_is_left_alone(request_: Request) -> None:
    tokens, hashes = list(request_.all_token_ids), list(request_.block_hashes)
    assert not hold_back(request_, 1)
    assert list(request_.all_token_ids) == tokens == request_.prompt_token_ids
    assert request_.block_hashes == hashes
    assert request_.max_tokens == 16


def group(is_state: bool = False, window: int = 0) -> CacheGroup:
    return CacheGroup(0, "kv.0", (), None, BLOCK_SIZE, window, is_state)


def test_prompts_are_shortened_where_a_group_holds_states() -> None:
    assert num_held_back((group(), group(window=8))) == 0
    assert num_held_back((group(), group(is_state=True))) == 1


def test_of_states_the_last_one_counts() -> None:
    table = [5, 6, 7, 8]
    assert group().blocks_of(table, 9) == (5, 6, 7)
    assert group(is_state=True).blocks_of(table, 8) == (0, 6)
    assert group(is_state=True).blocks_of(table, 9) == (0, 0, 7)
    assert group(is_state=True).blocks_of([9], 1) == (9,)
    assert group(is_state=True).blocks_of([], 1) == ()
    assert group(is_state=True).can_load((0, 0, 7), BLOCK_SIZE, 9, 9)
    assert not group(is_state=True).can_load((0, 6, 0), BLOCK_SIZE, 9, 9)
    assert not group().can_load((0, 6, 7), BLOCK_SIZE, 9, 9)


def test_a_window_that_ends_where_decode_begins_has_all_that_it_looks_at() -> None:
    # Prefill has gone one token further, and given back the block that token 3, of ten, is in.
    assert not group(window=7).can_load((0, 6, 7), BLOCK_SIZE, 10, 9)
    assert group(window=7).can_load((5, 6, 7), BLOCK_SIZE, 9, 9)
    assert group(window=6).can_load((0, 6, 7), BLOCK_SIZE, 10, 9)
