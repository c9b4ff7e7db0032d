"""Caches of other kinds: windows with their own block tables, a latent for all heads, divided heads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.bench.engines.vllm_server import VllmServer, complete
from kvxfer.bench.errors import BenchError
from tests.vllm import tiny_models
from tests.vllm.engine import Engines, random_prompt, server, start_pair
from tests.vllm.handover import assert_flipped_bits_change_the_tokens, assert_handed_over, handed_over

Two = tuple[VllmServer, VllmServer]
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


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("windows")
    with start_pair(tiny_models.save("gemma3", folder / "model"), folder) as pair:
        yield pair


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("latents")
    with start_pair(tiny_models.save("deepseek", folder / "model"), folder) as pair:
        yield pair


@pytest.mark.parametrize(("length", "how"), CASES)
def test_windows(windows: Two, length: int, how: str) -> None:
    assert_handed_over(*windows, random_prompt(length), how)


def test_a_window_that_prefill_has_left_is_computed_by_decode(windows: Two, how: str) -> None:
    # The last token of a prompt attends to a token whose block prefill gives back at the end: the last one of
    # a block. In a push this block was written before, if decode had registered by then. Requests that are
    # sent at once arrive in either order, and a late decode is refused.
    prefill, decode = windows
    for waits_s in (0.3, 1.0, 5.0, 20.0):
        prompt = random_prompt(64 + 32 * 4 - 1)
        try:
            tokens, brought = handed_over(prefill, decode, prompt, how, waits_s)
            break
        except BenchError:
            assert "prefill has given back 1 pages" in decode.log.read_text(errors="replace")
            assert (how, waits_s) in {("push", each) for each in (0.3, 1.0, 5.0)}
    assert tokens == complete(prefill, prompt).token_ids
    assert brought >= len(prompt) - 1 if how == "push" else brought == 0


@pytest.mark.parametrize(("length", "how"), CASES)
def test_latents(latents: Two, length: int, how: str) -> None:
    assert_handed_over(*latents, random_prompt(length), how)


@pytest.mark.parametrize("kind", ["windows", "latents"])
def test_what_arrives_is_what_decode_goes_on_from(request: pytest.FixtureRequest, kind: str) -> None:
    prefill, decode = request.getfixturevalue(kind)
    assert_flipped_bits_change_the_tokens(prefill, decode, random_prompt(100))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The session's model with its heads divided among two workers, as prefill and as decode."""
    folder = tmp_path_factory.mktemp("two-ranks")
    weights = tiny_models.save("llama", folder / "model")
    with server("two-ranks", weights, folder, "kv_both", arguments=["--tensor-parallel-size", "2"]) as engine:
        yield engine.wait_ready()


@pytest.mark.parametrize(("length", "how"), CASES)
def test_heads_divide(engines: Engines, two_ranks: VllmServer, length: int, how: str) -> None:
    prompt = random_prompt(length)
    assert_handed_over(engines.prefill, two_ranks, prompt, how, engines.expected(prompt))


@pytest.mark.parametrize(("length", "how"), CASES)
def test_heads_meet(engines: Engines, two_ranks: VllmServer, length: int, how: str) -> None:
    prompt = random_prompt(length)
    assert_handed_over(two_ranks, engines.decode, prompt, how, engines.expected(prompt))
