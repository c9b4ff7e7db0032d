"""Clients that leave, requests that decode fetches late, and parameters that a router forgets."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvxfer.bench.engines.vllm_server import complete
from kvxfer.bench.errors import BenchError
from tests.vllm import tiny_models
from tests.vllm.engine import Engines, random_prompt, start_pair
from tests.waiting import until

# Of a cache of 256 blocks each prompt takes 29.
LENGTH = 900


@pytest.fixture(scope="module")
def pair(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Prefill keeps all blocks that it may, and none expire; decode computes no prompt."""
    folder = tmp_path_factory.mktemp("abandoned")
    weights = tiny_models.save("llama", folder / "model")
    settings: dict[str, Any] = {"lease_ttl_s": 600.0, "claim_within_s": 0.5, "require_transfer": True}
    # As in pods; the address of the default route may not be in a private network.
    settings["environment"] = {"KVXFER_HOST": "0.0.0.0", "KVXFER_SECRET": "a secret for tests only"}
    settings["allowed_hosts"] = ["*"]
    with start_pair(weights, folder, **settings) as (prefill, decode):
        yield Engines(engines.alone, prefill, decode, engines.router, folder / "observed")


def test_prompts_that_80_of_100_clients_have_abandoned_keep_no_blocks_from_the_others(
    pair: Engines, seed: int
) -> None:
    come_back = set(random.Random(seed).sample(range(100), 20))
    answers: list[tuple[str, list[int]]] = []
    for at in range(100):
        prompt = random_prompt(LENGTH, at)
        params = pair.prefilled(prompt, f"client-{at}")
        if at in come_back:
            answers.append((prompt, pair.decoded(prompt, f"client-{at}", params, 4).token_ids))
    assert len(answers) == 20
    for prompt, token_ids in answers[::5]:
        assert token_ids == pair.expected(prompt, 4)
    assert pair.decode.prompt_tokens("external_kv_transfer") == 20 * LENGTH
    # At most eight are still kept; the others have given way, and none has expired.
    gave_way = pair.prefill.metric("vllm:kvxfer_gave_way_requests_total")
    assert 72 <= gave_way <= 80
    until(
        lambda: pair.prefill.metric("vllm:kvxfer_kept_requests") == 80 - gave_way,
        f"all kept of which {gave_way} of 80 gave way",
    )
    assert pair.prefill.metric("vllm:kvxfer_expired_requests_total") == 0
    assert "no engine has asked for its cache" in pair.prefill.log.read_text(errors="replace")


def test_a_router_that_passes_nothing_on_is_told_to_by_errors(pair: Engines) -> None:
    refused = pair.decode.metric("vllm:kvxfer_untransferred_requests_total")
    brought = pair.decode.prompt_tokens("external_kv_transfer")
    for at, passed in enumerate((None, {}, {"do_remote_prefill": False})):
        request_id = f"forgotten-{at}"
        with pytest.raises(BenchError, match="answered 500"):
            complete(pair.decode, random_prompt(100, at), request_id=request_id, kv_transfer_params=passed)
        log = pair.decode.log.read_text(errors="replace").splitlines()
        (said,) = [line for line in log if f"cmpl-{request_id}-" in line and "cache not loaded" in line]
        assert "it names no cache, and 100 tokens of its prompt would have to be computed here" in said
    assert pair.decode.metric("vllm:kvxfer_untransferred_requests_total") == refused + 3
    assert pair.decode.metric("vllm:kvxfer_failed_loads_total", code="no-handover") == 3
    # Short prompts are computed, and handed-over requests continue.
    assert complete(pair.decode, random_prompt(20), 4).token_ids
    prompt = random_prompt(100, 7)
    params = pair.prefilled(prompt, "on")
    assert params["remote_host"] != "0.0.0.0"
    assert pair.decoded(prompt, "on", params).token_ids == pair.expected(prompt)
    assert pair.decode.prompt_tokens("external_kv_transfer") == brought + 100


LEASE_TTL_S = 3.0


@pytest.fixture(scope="module")
def one_at_a_time(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A decode that computes one request at a time, while all others wait."""
    folder = tmp_path_factory.mktemp("queued")
    weights = tiny_models.save("llama", folder / "model")
    arguments = ["--max-num-seqs", "1"]
    with start_pair(weights, folder, lease_ttl_s=LEASE_TTL_S, arguments=arguments) as (prefill, decode):
        yield Engines(engines.alone, prefill, decode, engines.router, folder / "observed")


@pytest.mark.slow  # half a minute of waiting
def test_a_request_that_waits_at_decode_for_six_lease_times_loads(one_at_a_time: Engines) -> None:
    pair = one_at_a_time
    prompt = random_prompt(LENGTH)
    with ThreadPoolExecutor(64) as threads:
        began = time.monotonic()
        first = complete(pair.decode, random_prompt(20, 7), 900)
        # Enough requests precede it in the queue that it waits for longer.
        count = int(8 * LEASE_TTL_S / (time.monotonic() - began)) + 1
        before = [
            threads.submit(complete, pair.decode, random_prompt(20, 100 + at), 900) for at in range(count)
        ]
        until(lambda: pair.decode.num_requests() >= count, f"{count} requests at decode", pause_s=0.05)
        params = pair.prefilled(prompt, "queued")
        asked = time.monotonic()
        answer = threads.submit(pair.decoded, prompt, "queued", params).result()
        assert time.monotonic() - asked > 6 * LEASE_TTL_S, "it did not wait"
        assert all(len(each.result().token_ids) == len(first.token_ids) for each in before)
    assert answer.token_ids == pair.expected(prompt)
    assert pair.decode.prompt_tokens("external_kv_transfer") == LENGTH
    assert not pair.has_expired("queued")
    pair.wait_empty()
