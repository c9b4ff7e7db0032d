"""Caches with states (GDN, Mamba2): decode continues from the state before the prompt's last token."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from kvxfer.bench.engines.vllm_server import complete, completion_request
from tests.vllm.engine import FLIP, TO_PREFILL, Engines, random_prompt, start_engines
from tests.vllm.gdn_attention import float32_states
from tests.vllm.plugins import plugin

#: Short, so that blocks without a reader are given back while a test waits.
LEASE_TTL_S = 5.0
# The engine chooses it, so that one layer's states take the room of a whole number of attention tokens.
GDN_BLOCK = 288
GDN_CHUNK = 128
GDN_LENGTHS = (2, 65, 128, 130, GDN_BLOCK, GDN_BLOCK + 1, GDN_BLOCK + 2, 2 * GDN_BLOCK + 1, 897)
# With vLLM's own kernel, which supports only bfloat16. Its rounding depends on where a prompt is cut, so
# everything is computed in chunks of 32. Prompts have one token more, which one engine computes separately,
# as decode does. By default vLLM keeps states in float32 on CPUs with AVX-512 for bfloat16, and its blocks
# are larger there.
BFLOAT16_ARGUMENTS = (
    *("--dtype", "bfloat16", "--mamba-ssm-cache-dtype", "bfloat16"),
    *("--max-num-batched-tokens", "32"),
)
BFLOAT16_LENGTHS = (33, 65, GDN_BLOCK + 1, GDN_BLOCK + 33, 2 * GDN_BLOCK + 1, 897)
# Mamba2 is computed in float32. Chunks of 128 tokens; one block holds a request's state, however long.
MAMBA2_CHUNK = 128
MAMBA2_LENGTHS = (2, 3, 64, 127, 128, 129, 130, 256, 257, 258, 700, 990)


start = partial(start_engines, lease_ttl_s=LEASE_TTL_S)

# GDN, which models in demand have, is in every run; the other engines run at night.
KINDS = ("gdn", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gdn_bfloat16", "mamba2")))


@pytest.fixture
def hybrid(request: pytest.FixtureRequest, kind: str) -> Engines:
    engines: Engines = request.getfixturevalue(kind)
    return engines


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """States with a prefix cache: there is a state at the end of each block."""
    folder = tmp_path_factory.mktemp("gdn")
    arguments = ("--max-num-batched-tokens", str(GDN_CHUNK))
    with start("qwen3-next", folder, arguments=arguments, environment=plugin(float32_states, folder)) as gdn:
        yield gdn


@pytest.fixture(scope="module")
def gdn_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with start("qwen3-next", tmp_path_factory.mktemp("bfloat16"), arguments=BFLOAT16_ARGUMENTS) as gdn:
        yield gdn


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """States without a prefix cache, which vLLM's CPU kernels of Mamba2 do not support."""
    arguments = ("--no-enable-prefix-caching", "--max-num-batched-tokens", str(MAMBA2_CHUNK))
    with start("granite-hybrid", tmp_path_factory.mktemp("mamba2"), arguments=arguments) as mamba2:
        yield mamba2


def assert_handed_over(engines: Engines, prompt: str, num_held: int = 0) -> None:
    """Asserts that decode gets a prompt but its last token and what it holds, and answers as one engine."""
    before = engines.decode.prompt_tokens("external_kv_transfer")
    request_id = f"{hash(prompt)}"
    params = engines.prefilled(prompt, request_id)
    tokens = engines.decoded(prompt, request_id, params).token_ids
    assert engines.decode.prompt_tokens("external_kv_transfer") - before == len(prompt) - 1 - num_held
    assert tokens == engines.expected(prompt)
    assert len(set(tokens)) > 4
    sent, received = (
        json.loads((engines.observed / f"{params['remote_request_id']}.{what}").read_text())
        for what in ("sent", "received")
    )
    assert sent == received
    assert sent
    assert all(any(hashes) for hashes in sent)


@pytest.mark.parametrize("length", GDN_LENGTHS)
def test_gdn(gdn: Engines, length: int) -> None:
    assert_handed_over(gdn, random_prompt(length))


@pytest.mark.slow
@pytest.mark.parametrize("length", BFLOAT16_LENGTHS)
def test_gdn_in_bfloat16(gdn_bfloat16: Engines, length: int) -> None:
    assert_handed_over(gdn_bfloat16, random_prompt(length))


@pytest.mark.slow
@pytest.mark.parametrize("length", MAMBA2_LENGTHS)
def test_mamba2(mamba2: Engines, length: int) -> None:
    assert_handed_over(mamba2, random_prompt(length))


# After the first length, decode has a state to continue from. After the second, it has two blocks of tokens
# but no state at their end, which comes from prefill.
@pytest.mark.parametrize("beginning", [2 * GDN_BLOCK + 1, 2 * GDN_BLOCK + 33])
def test_of_a_beginning_that_decode_holds_the_state_alone_is_moved(gdn: Engines, beginning: int) -> None:
    prompt = random_prompt(beginning)
    assert_handed_over(gdn, prompt)
    assert_handed_over(gdn, prompt + random_prompt(96), num_held=2 * GDN_BLOCK)


@pytest.mark.parametrize("later", ["prefill", "decode"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_pushed_with_the_last_token(hybrid: Engines, later: str) -> None:
    length = GDN_BLOCK + 33
    ranks, prompt, key = hybrid.ranks(), random_prompt(length), secrets.token_hex(16)
    before = hybrid.decode.prompt_tokens("external_kv_transfer")
    waits = {f"{later}_waits_s": 0.3}
    assert hybrid.pushed(prompt, ranks, key=key, **waits).token_ids == hybrid.expected(prompt)
    assert hybrid.decode.prompt_tokens("external_kv_transfer") - before == length - 1
    sent, received = (
        json.loads((hybrid.observed / f"{key}.{what}").read_text()) for what in ("sent", "received")
    )
    assert sent == received


# If a stop token ends an answer, the engine has already computed the following step.
@pytest.mark.slow
@pytest.mark.parametrize("ends_early", [False, True])
def test_a_later_turn_goes_on_from_the_state_of_decode(mamba2: Engines, ends_early: bool) -> None:
    prompt = random_prompt(200)
    expected = mamba2.expected(prompt, 100)
    params = {**mamba2.prefilled(prompt, "turn 1"), "do_remote_decode": True}
    stop: dict[str, Any] = {"stop_token_ids": [expected[40]]} if ends_early else {}
    turn = complete(mamba2.decode, prompt, 100, kv_transfer_params=params, **stop)
    assert turn.finish_reason == ("stop" if ends_early else "length")
    assert turn.token_ids == expected[: len(turn.token_ids)]
    assert turn.kv_transfer_params
    tokens = turn.prompt_token_ids + turn.token_ids + list(random_prompt(60).encode())
    before = mamba2.prefill.prompt_tokens("external_kv_transfer")
    answer = complete(mamba2.prefill, tokens, 1, kv_transfer_params=turn.kv_transfer_params)
    moved = mamba2.prefill.prompt_tokens("external_kv_transfer") - before
    assert moved in (200 + len(turn.token_ids) - 1, 200 + len(turn.token_ids))
    assert answer.kv_transfer_params
    again = complete(mamba2.decode, tokens, kv_transfer_params=answer.kv_transfer_params)
    assert again.token_ids == complete(mamba2.prefill, tokens).token_ids
    mamba2.wait_empty()


@pytest.mark.parametrize("what", ["states", "tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_exponents_change_the_tokens(hybrid: Engines, what: str) -> None:
    prompt = random_prompt(97)
    expected = hybrid.expected(prompt)
    flip = hybrid.observed / FLIP
    flip.write_text(what)
    try:
        params = hybrid.prefilled(prompt, f"flipped {what}")
        assert hybrid.decoded(prompt, f"flipped {what}", params).token_ids != expected
    finally:
        flip.unlink()


@pytest.mark.slow
def test_many_at_once_each_go_on_from_their_own_state(mamba2: Engines) -> None:
    prompts = [random_prompt(2 + 61 * number) for number in range(12)]
    before = mamba2.decode.prompt_tokens("external_kv_transfer")
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda prompt: complete(mamba2.router, prompt).token_ids, prompts))
    moved = mamba2.decode.prompt_tokens("external_kv_transfer") - before
    assert moved == sum(len(prompt) - 1 for prompt in prompts)
    assert answers == [mamba2.expected(prompt) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_token_is_decodes_own(hybrid: Engines) -> None:
    answer = complete(hybrid.prefill, "k", 1, kv_transfer_params=TO_PREFILL)
    assert answer.kv_transfer_params is None
    before = hybrid.decode.prompt_tokens("local_compute")
    assert complete(hybrid.router, "k").token_ids == hybrid.expected("k")
    assert hybrid.decode.prompt_tokens("local_compute") - before == 1


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_goes_no_further_than_it_hands_over(hybrid: Engines) -> None:
    # A router should ask for one token. If it asks for more, the state is still the one before the last
    # token.
    prompt = random_prompt(193)
    answer = complete(hybrid.prefill, prompt, 16, min_tokens=8, kv_transfer_params=TO_PREFILL)
    assert answer.kv_transfer_params
    assert len(answer.token_ids) == 1
    assert answer.prompt_token_ids == complete(hybrid.prefill, prompt, 1).prompt_token_ids
    tokens = hybrid.decoded(prompt, "no further", answer.kv_transfer_params).token_ids
    assert tokens == hybrid.expected(prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_stays_held(hybrid: Engines) -> None:
    prompt = random_prompt(300)
    assert hybrid.decoded(prompt, "early", hybrid.prefilled(prompt, "early"), max_tokens=1).token_ids
    hybrid.prefilled(random_prompt(300), "forgotten")
    gone = 0
    for number, timeout_s in enumerate((0.01, 0.03, 0.1, 0.3)):
        for engine, params in ((hybrid.prefill, TO_PREFILL), (hybrid.decode, None)):
            left = random_prompt(400, seed=number)
            params = params or hybrid.prefilled(left, f"left {number}")
            body = completion_request(left, 64, f"left {number}", kv_transfer_params=params)
            try:
                httpx.post(f"{engine.url}/v1/completions", timeout=timeout_s, **body)
            except httpx.TimeoutException:
                gone += 1
    assert gone, "no answer took as long as 10 ms"
    hybrid.wait_empty(LEASE_TTL_S + 20)
    assert_handed_over(hybrid, random_prompt(97))
