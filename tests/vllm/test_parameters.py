"""Parameters that no router should pass: they fail only their own request, with a clear message."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.bench.errors import BenchError
from kvxfer.directory import Entry
from tests.vllm.engine import Engines, random_prompt

RANK = Entry("nobody", "tcp://127.0.0.1:1", bytes(16)).to_dict()

PASSED: list[dict[str, Any]] = [
    {"kvxfer": None},
    {"kvxfer": "ranks"},
    {"kvxfer": [[[[[[[[]]]]]]]]},
    {"remote_block_ids": [[2**40] * 4]},
    {"remote_block_ids": [[4_000_000_000] * 4]},
    {"remote_block_ids": [[1.5] * 4]},
    {"remote_block_ids": [[1] * 5000]},
    {"remote_block_ids": [[1] * 4] * 100},
    {"remote_request_id": None},
    {"remote_request_id": "x" * 100_000},
]
OWN: list[dict[str, Any]] = [
    {"version": 99},
    {"ranks": []},
    {"ranks": [RANK] * 5000},
    {"ranks": [RANK]},
    {"ranks": [{**RANK, "address": "http://127.0.0.1/"}]},
    {"ranks": [{**RANK, "address": "tcp://192.0.2.1:7301"}]},
    {"leases": ["kvxfer-lease-1.0000000000000001"]},
    {"leases": ["zz"]},
    {"leases": ["f" * 16]},
    {"leases": ["f" * 100_000]},
    {"leases": [7]},
    {"block_sizes": [0]},
    {"pages_per_block": [2**19]},
    {"num_tokens": 2**62},
    {"num_tokens": -1},
    {"prompt": "0" * 32},
]


def refused(engines: Engines, prompt: str, params: dict[str, Any]) -> None:
    with pytest.raises(BenchError, match="answered 500"):
        engines.decoded(prompt, "refused", params)


def serves_on(engines: Engines, prompt: str) -> None:
    """Whether both engines hand over the next request."""
    params = engines.prefilled(prompt, "next")
    assert engines.decoded(prompt, "next", params).token_ids == engines.expected(prompt)


@pytest.mark.parametrize("damage", PASSED, ids=lambda damage: str(damage)[:40])
def test_what_routers_pass(engines: Engines, damage: dict[str, Any]) -> None:
    prompt = random_prompt(100)
    params = engines.prefilled(prompt, "damaged")
    refused(engines, prompt, {**params, **damage})
    serves_on(engines, prompt)


@pytest.mark.parametrize("damage", OWN, ids=lambda damage: str(damage)[:40])
def test_what_is_ours(engines: Engines, damage: dict[str, Any]) -> None:
    prompt = random_prompt(100)
    params = engines.prefilled(prompt, "damaged")
    refused(engines, prompt, {**params, "kvxfer": {**params["kvxfer"], **damage}})
    serves_on(engines, prompt)


def test_parameters_are_of_one_prompt(engines: Engines) -> None:
    prompt = random_prompt(64)
    params = engines.prefilled(prompt, "mixed up")
    refused(engines, random_prompt(64, seed=2), params)
    # For every request that it answers with an error, the engine reports that its cache will not be fetched.
    engines.wait_empty()
    assert not engines.has_expired("mixed up")
    refused(engines, prompt, params)
    serves_on(engines, prompt)


def test_parameters_are_of_one_use(engines: Engines) -> None:
    prompt = random_prompt(64)
    params = engines.prefilled(prompt, "once")
    assert engines.decoded(prompt, "once", params).token_ids == engines.expected(prompt)
    engines.wait_empty()
    # Otherwise decode has the prompt and does not ask.
    engines.forget_prefixes()
    refused(engines, prompt, params)
