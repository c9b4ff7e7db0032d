"""Drafts of several kinds: their layers are in the model's cache and move with it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.vllm_server import VllmServer, complete
from tests.vllm.drafts import DRAFTS, Draft
from tests.vllm.engine import FLIP, TO_PREFILL, push, random_prompt, ranks_of, start_pair

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Pair:
    """Engines of one model, with one draft."""

    prefill: VllmServer
    decode: VllmServer
    observed: Path
    draft: Draft


@pytest.fixture(scope="module", params=DRAFTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    draft, folder = DRAFTS[request.param], tmp_path_factory.mktemp(request.param)
    model = tiny_models.save("llama", folder / "llama")
    saved = draft.save(model, folder / "draft")
    config: dict[str, Any] = {"method": draft.method, "num_speculative_tokens": draft.num_drafted}
    if draft.has_model:
        model = saved
    else:
        config["model"] = str(saved)
    arguments = ["--speculative-config", json.dumps(config)]
    with start_pair(model, folder, arguments=arguments) as (prefill, decode):
        yield Pair(prefill, decode, folder / "observed", draft)


@pytest.mark.parametrize("how", ["pull", "push"])
@pytest.mark.parametrize("length", [20, 64, 70, 500])
def test_decode_drafts_as_prefill_would(pair: Pair, length: int, how: str) -> None:
    prefill, decode, prompt = pair.prefill, pair.decode, random_prompt(length)
    before = counted(decode)
    name = secrets.token_hex(16)
    if how == "push":
        tokens = push(prefill, decode, prompt, ranks_of(prefill), key=name).token_ids
    else:
        params = complete(prefill, prompt, 1, kv_transfer_params=TO_PREFILL).kv_transfer_params
        assert params
        name = params["remote_request_id"]
        tokens = complete(decode, prompt, kv_transfer_params=params).token_ids
    brought, nbytes, drafted, accepted = since(before, decode)
    assert brought >= length - 1
    assert nbytes == -(-length // 32) * pair.draft.num_heads * 32 * 64 * 4  # 32 tokens, 2 x 32 floats
    sent, received = (
        json.loads((pair.observed / f"{name}.{what}").read_text()) for what in ("sent", "received")
    )
    # While the last page is written, the draft continues after the prompt's end.
    whole = length // 32 if how == "push" else -(-length // 32)
    for there, here in zip(sent, received, strict=True):
        assert there[:whole] == here[:whole]
        assert len(there) == len(here) == -(-length // 32)
    # Prefill continues the prompt as well. Tokens are right regardless of the drafts, but fewer drafts are
    # accepted if the cache lacks the prompt.
    before = counted(prefill)
    assert tokens == complete(prefill, prompt).token_ids
    _, _, drafted_there, accepted_there = since(before, prefill)
    assert accepted == accepted_there > 0
    # An engine pads the first step after a handover with tokens that were not drafted.
    assert drafted - pair.draft.num_drafted == drafted_there


def test_a_flipped_exponent_of_the_draft_changes_what_is_drafted_alone(pair: Pair) -> None:
    prompt = random_prompt(30)
    flip = pair.observed / FLIP
    flip.write_text("draft")
    try:
        params = complete(pair.prefill, prompt, 1, kv_transfer_params=TO_PREFILL).kv_transfer_params
        before = counted(pair.decode)
        tokens = complete(pair.decode, prompt, kv_transfer_params=params).token_ids
    finally:
        flip.unlink()
    *_, accepted = since(before, pair.decode)
    before = counted(pair.prefill)
    assert tokens == complete(pair.prefill, prompt).token_ids
    *_, accepted_there = since(before, pair.prefill)
    assert accepted < accepted_there


def since(before: list[float], server: VllmServer) -> list[float]:
    return [now - then for then, now in zip(before, counted(server), strict=True)]


def counted(server: VllmServer) -> list[float]:
    names = (
        "vllm:kvxfer_load_bytes_sum",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )
    return [float(server.prompt_tokens("external_kv_transfer")), *map(server.metric, names)]
