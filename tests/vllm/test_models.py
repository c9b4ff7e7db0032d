"""Caches of other kinds: windows with block tables of their own, a latent for all heads, divided heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvxfer.bench.engines.vllm_server import VllmServer, complete
from tests.vllm import tiny_models
from tests.vllm.early_start import started
from tests.vllm.engine import Engines, random_prompt, server
from tests.vllm.handover import assert_flipped_bits_change_the_tokens, assert_handed_over, handed_over

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
    assert_handed_over(*windows, random_prompt(length), how)


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
    assert_handed_over(*latents, random_prompt(length), how)


@pytest.mark.parametrize("kind", ["windows", "latents"])
def test_what_arrives_is_what_decode_goes_on_from(request: pytest.FixtureRequest, kind: str) -> None:
    prefill, decode = request.getfixturevalue(kind)
    assert_flipped_bits_change_the_tokens(prefill, decode, random_prompt(100))


def start_two_ranks(folder: Path) -> VllmServer:
    """The session's model with its heads divided among two workers, as prefill and as decode."""
    weights = tiny_models.save("llama", folder / "model")
    return server("two-ranks", weights, folder, "kv_both", arguments=["--tensor-parallel-size", "2"])


two_ranks = started("two_ranks", start_two_ranks)


@pytest.mark.parametrize(("length", "how"), CASES)
def test_heads_divide(engines: Engines, two_ranks: VllmServer, length: int, how: str) -> None:
    prompt = random_prompt(length)
    assert_handed_over(engines.prefill, two_ranks, prompt, how, engines.expected(prompt))


@pytest.mark.parametrize(("length", "how"), CASES)
def test_heads_meet(engines: Engines, two_ranks: VllmServer, length: int, how: str) -> None:
    prompt = random_prompt(length)
    assert_handed_over(two_ranks, engines.decode, prompt, how, engines.expected(prompt))
