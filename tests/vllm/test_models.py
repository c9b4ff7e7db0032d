"""Caches of other kinds: windows with block tables of their own, a latent for all heads, divided heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvxfer.bench import tiny_models
from kvxfer.bench.vllm_server import VllmServer, complete
from tests.vllm.early_start import started
from tests.vllm.engine import FLIP, TO_PREFILL, Engines, push, random_prompt, ranks_of, server

# Around a block, around a window of 64, and far beyond it.
LENGTHS = (20, 64, 70, 96, 130, 500)
# Each length in one of the two ways; in the other at night.
CASES = [
    pytest.param(length, how, marks=() if (at + (how == "push")) % 2 == 0 else pytest.mark.slow)
    for at, length in enumerate(LENGTHS)
    for how in ("pull", "push")
]


@pytest.fixture(params=["pull", "push"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def handed_over(
    prefill: VllmServer, decode: VllmServer, prompt: str | Sequence[int], how: str = "pull"
) -> tuple[list[int], int]:
    """Returns the tokens of a pair, and how many of the prompt's came from the prefill engine."""
    before = decode.prompt_tokens("external_kv_transfer")
    if how == "push":
        tokens = push(prefill, decode, prompt, ranks_of(prefill)).token_ids
    else:
        params = complete(prefill, prompt, 1, kv_transfer_params=TO_PREFILL).kv_transfer_params
        tokens = complete(decode, prompt, kv_transfer_params=params).token_ids
    return tokens, decode.prompt_tokens("external_kv_transfer") - before


@contextmanager
def start_pair(model: str, folder: Path) -> Iterator[tuple[VllmServer, VllmServer]]:
    weights = tiny_models.save(model, folder / "model")
    with (
        server("prefill", weights, folder, "kv_producer") as prefill,
        server("decode", weights, folder, "kv_consumer") as decode,
    ):
        yield prefill, decode


windows = started("windows", partial(start_pair, "gemma3"))
latents = started("latents", partial(start_pair, "deepseek"))


@pytest.mark.parametrize(("length", "how"), CASES)
def test_windows(windows: tuple[VllmServer, VllmServer], length: int, how: str) -> None:
    prefill, decode = windows
    prompt = random_prompt(length)
    tokens, brought = handed_over(prefill, decode, prompt, how)
    assert brought >= length - 1
    assert tokens == complete(prefill, prompt).token_ids
    assert len(set(tokens)) > 4


def test_a_window_that_prefill_has_left_is_computed_by_decode(
    windows: tuple[VllmServer, VllmServer], how: str
) -> None:
    # The last token of a prompt looks at one that prefill has given back when it has ended: the last
    # of a block. In a push it was written before.
    prefill, decode = windows
    prompt = random_prompt(64 + 32 * 4 - 1)
    tokens, brought = handed_over(prefill, decode, prompt, how)
    assert tokens == complete(prefill, prompt).token_ids
    assert brought >= len(prompt) - 1 if how == "push" else brought == 0


@pytest.mark.parametrize(("length", "how"), CASES)
def test_latents(latents: tuple[VllmServer, VllmServer], length: int, how: str) -> None:
    prefill, decode = latents
    observed = prefill.log.parent / "observed"
    before = set(observed.glob("*.received"))
    prompt = random_prompt(length)
    tokens, brought = handed_over(prefill, decode, prompt, how)
    assert brought >= length - 1
    assert tokens == complete(prefill, prompt).token_ids
    assert len(set(tokens)) > 4
    (received,) = set(observed.glob("*.received")) - before
    assert received.read_text() == received.with_suffix(".sent").read_text()


def test_what_arrives_of_latents_is_what_decode_goes_on_from(latents: tuple[VllmServer, VllmServer]) -> None:
    prefill, decode = latents
    prompt = random_prompt(100)
    flip = prefill.log.parent / "observed" / FLIP
    flip.touch()
    try:
        assert handed_over(prefill, decode, prompt)[0] != complete(prefill, prompt).token_ids
    finally:
        flip.unlink()


def start_two_ranks(folder: Path) -> VllmServer:
    """The session's model with its heads divided among two workers, as prefill and as decode."""
    weights = tiny_models.save("llama", folder / "model")
    return server("two-ranks", weights, folder, "kv_both", arguments=["--tensor-parallel-size", "2"])


two_ranks = started("two_ranks", start_two_ranks)


@pytest.mark.parametrize(("length", "how"), CASES)
def test_heads_divide(engines: Engines, two_ranks: VllmServer, length: int, how: str) -> None:
    prompt = random_prompt(length)
    tokens, brought = handed_over(engines.prefill, two_ranks, prompt, how)
    assert tokens == engines.expected(prompt)
    assert brought >= length - 1


@pytest.mark.parametrize(("length", "how"), CASES)
def test_heads_meet(engines: Engines, two_ranks: VllmServer, length: int, how: str) -> None:
    prompt = random_prompt(length)
    tokens, brought = handed_over(two_ranks, engines.decode, prompt, how)
    assert tokens == engines.expected(prompt)
    assert brought >= length - 1
