"""The engine's own requests: what the connector reads of them, and what prefill leaves to decode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvxfer.connectors.vllm.request import VllmRequest

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
    assert VllmRequest(request).hold_back(1)
    assert request.num_prompt_tokens == request.num_tokens == num_tokens - 1
    assert request.prompt_token_ids == tokens[:-1] == list(request.all_token_ids)
    assert request.block_hashes == shorter.block_hashes
    assert request.max_tokens == 1
    # The front end returns the prompt that it got.
    assert tokens == list(range(num_tokens))
    for each in (request, shorter):
        each.append_output_token_ids(99)
    assert request.block_hashes == shorter.block_hashes


def test_a_refused_request_is_told_from_others() -> None:
    request = request_of([0])
    assert not VllmRequest(request).was_refused
    request.abort_immediately = True
    assert VllmRequest(request).was_refused


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
    assert not VllmRequest(request_).hold_back(1)
    assert list(request_.all_token_ids) == tokens == request_.prompt_token_ids
    assert request_.block_hashes == hashes
    assert request_.max_tokens == 16


@pytest.mark.parametrize(
    ("headers", "trace"),
    [
        (None, ""),
        ({"tracestate": "a=b"}, ""),
        ({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}, f"00-{'a' * 32}-{'b' * 16}-01"),
        ({"traceparent": "00-whatever a client sends"}, ""),
    ],
)
def test_a_trace_is_one_or_none(headers: dict[str, str] | None, trace: str) -> None:
    assert VllmRequest(request_of([7, 8], trace_headers=headers)).trace == trace


def test_what_decides_a_cache_beside_the_tokens_is_told() -> None:
    media: Any = SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=7, length=1))
    with_media = request_of(list(range(10)), mm_features=[media])
    lora = LoRARequest("adapter", 1, "/adapters/adapter")
    plain, adapted = request_of(list(range(10))), request_of(list(range(10)), lora_request=lora)
    told = [VllmRequest(each).beside_tokens(10) for each in (plain, with_media, adapted)]
    assert len(set(told)) == 3
    # Later parts of a prompt do not affect its beginning.
    assert VllmRequest(with_media).beside_tokens(7) == told[0] != VllmRequest(with_media).beside_tokens(8)


@pytest.mark.parametrize(
    ("name", "family", "batch"),
    [
        ("cmpl-1-0-89abcdef", None, ("cmpl-1", 0)),
        ("cmpl-a-2-3-1-89abcdef", None, ("cmpl-a-2-3", 1)),
        ("0_cmpl-1-0-89abcdef", "cmpl-1-0-89abcdef", ("cmpl-1", 0)),
        ("12_cmpl-1-4-89abcdef", "cmpl-1-4-89abcdef", ("cmpl-1", 4)),
        ("chatcmpl-1-2-89abcdef", None, ("chatcmpl-1-2", 0)),
        ("3_chatcmpl-1-89abcdef", "chatcmpl-1-89abcdef", ("chatcmpl-1", 0)),
        ("cmpl-cmpl-1-89abcdef", None, ("cmpl-cmpl", 1)),
        ("0_cmpl-1", None, None),  # without random digits that make it unique
        ("cmpl-1-0", None, None),
        ("request-89abcdef", None, None),
    ],
)
def test_samples_and_prompts_of_one_request_are_told_by_their_names(
    name: str, family: str | None, batch: tuple[str, int] | None
) -> None:
    request = VllmRequest(Request(name, [1], SamplingParams(), None))
    assert (request.family, request.batch) == (family, batch)
