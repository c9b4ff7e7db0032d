"""Speculative decoding: a draft model's layers are in the cache beside the model's, and move with them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.server_process import RouterServer
from kvxfer.bench.engines.vllm_server import VllmServer, complete
from kvxfer.bench.errors import BenchError
from tests.vllm.engine import TO_PREFILL, Engines, push, random_prompt, ranks_of, server, start_pair

pytestmark = pytest.mark.slow

NUM_DRAFTED = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculative")


def speculating(**config: Any) -> list[str]:
    return ["--speculative-config", json.dumps({"num_speculative_tokens": NUM_DRAFTED, **config})]


@pytest.fixture(scope="module")
def pair(engines: Engines, folder: Path) -> Iterator[Engines]:
    """The session's model, with itself as the draft: its drafts are right if its cache is."""
    weights = tiny_models.save("llama", folder / "model")
    options: dict[str, Any] = {
        "arguments": speculating(method="draft_model", model=str(weights)),
        "lease_ttl_s": 10.0,
    }
    with start_pair(weights, folder, ("kv_both", "kv_both"), **options) as (prefill, decode):
        yield Engines(engines.alone, prefill, decode, engines.router, folder / "observed")


@pytest.mark.parametrize("how", ["pull", "push"])
@pytest.mark.parametrize("length", [20, 64, 70, 500])
def test_the_cache_of_a_draft_model_is_handed_over_too(pair: Engines, length: int, how: str) -> None:
    prompt, name = random_prompt(length), secrets.token_hex(16)
    before = counted(pair.decode)
    if how == "pull":
        params = pair.prefilled(prompt, name)
        tokens, name = pair.decoded(prompt, name, params).token_ids, params["remote_request_id"]
    else:
        tokens = pair.pushed(prompt, pair.ranks(), key=name).token_ids
    assert tokens == pair.expected(prompt)
    brought, drafted, accepted, nbytes, pages = (
        now - then for then, now in zip(before, counted(pair.decode), strict=True)
    )
    assert brought >= length - 1
    # The model's four layers, and as many of the draft: 4 heads, 32 tokens, 2 x 32 floats.
    assert nbytes == pages * 8 * 4 * 32 * 64 * 4
    # Tokens are right regardless of the drafts. If the cache lacks the prompt, almost no draft is accepted.
    assert accepted > 0.8 * drafted > 0
    sent, received = (
        json.loads((pair.observed / f"{name}.{what}").read_text())[0] for what in ("sent", "received")
    )
    # While the last page is written, the draft continues after the prompt's end.
    whole = length // 32 if how == "push" else len(sent)
    assert sent[:whole] == received[:whole]
    assert len(sent) == len(received) == -(-length // 32)
    pair.wait_empty(30)


def counted(decode: VllmServer) -> list[float]:
    names = (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:kvxfer_load_bytes_sum",
        "vllm:kvxfer_loaded_pages_total",
    )
    return [float(decode.prompt_tokens("external_kv_transfer")), *map(decode.metric, names)]


def hand_over(prefill: VllmServer, decode: VllmServer, prompt: str, how: str) -> None:
    if how == "push":
        push(prefill, decode, prompt, ranks_of(prefill))
    else:
        params = complete(prefill, prompt, 1, kv_transfer_params=TO_PREFILL).kv_transfer_params
        complete(decode, prompt, kv_transfer_params=params)


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["pull", "push"])
def test_where_one_drafts_and_the_other_does_not_the_request_is_refused_in_words(
    engines: Engines, pair: Engines, who: str, how: str
) -> None:
    prefill = pair.prefill if who == "prefill" else engines.prefill
    decode = pair.decode if who == "decode" else engines.decode
    prompt = random_prompt(100)
    with pytest.raises(BenchError, match="answered 500"):
        hand_over(prefill, decode, prompt, how)
    words = decode.log.read_text(errors="replace")
    assert "--speculative-config draft_model" in words
    assert "layout-mismatch" in words
    engines.wait_empty(30)
    pair.wait_empty(30)


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
def test_what_is_looked_up_in_the_prompt_needs_no_cache(
    engines: Engines, looking_up: VllmServer, folder: Path, dispatch: str
) -> None:
    log = folder / f"{dispatch}.log"
    with RouterServer([engines.prefill.url], [looking_up.url], log, dispatch) as router:
        router.wait_ready()
        complete(router, random_prompt(10), 1)
        before = looking_up.prompt_tokens("external_kv_transfer")
        drafted = looking_up.metric("vllm:spec_decode_num_draft_tokens_total")
        # Repeated text is found by the n-gram lookup.
        prompts = [random_prompt(20 + 31 * number) * 2 for number in range(8)]
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: complete(router, prompt).token_ids, prompts))
    assert answers == [engines.expected(prompt) for prompt in prompts]
    moved = looking_up.prompt_tokens("external_kv_transfer") - before
    assert moved >= sum(len(prompt) - 1 for prompt in prompts)
    assert looking_up.metric("vllm:spec_decode_num_draft_tokens_total") > drafted
    engines.wait_empty()


@pytest.fixture(scope="module")
def looking_up(engines: Engines, folder: Path) -> Iterator[VllmServer]:
    """A decode that drafts by n-grams."""
    weights = tiny_models.save("llama", folder / "model")
    arguments = speculating(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    with server("looking-up", weights, folder, "kv_consumer", arguments=arguments) as decode:
        yield decode.wait_ready()
