"""A cache in fp8 under real engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench import tiny_models
from kvxfer.bench.vllm_server import VllmServer, complete
from tests.vllm.early_start import started
from tests.vllm.engine import FLIP, random_prompt, server
from tests.vllm.fp8_attention import ARGUMENTS, attention_of
from tests.vllm.test_models import handed_over

Two = tuple[VllmServer, VllmServer]


@contextmanager
def start_two(folder: Path) -> Iterator[Two]:
    weights = tiny_models.save("llama", folder / "model")
    options: dict[str, Any] = {"arguments": ARGUMENTS, "environment": attention_of(folder)}
    with (
        server("prefill", weights, folder, "kv_producer", **options) as prefill,
        server("decode", weights, folder, "kv_consumer", **options) as decode,
    ):
        yield prefill, decode


fp8 = started("fp8", start_two)


@pytest.mark.parametrize("how", ["pull", "push"])
def test_tokens_are_those_of_one_engine(fp8: Two, how: str) -> None:
    prefill, decode = fp8
    observed = prefill.log.parent / "observed"
    for length in (20, 64, 70, 500):
        before = set(observed.glob("*.received"))
        prompt = random_prompt(length)
        tokens, brought = handed_over(prefill, decode, prompt, how)
        assert brought >= length - 1
        assert tokens == complete(prefill, prompt).token_ids
        assert len(set(tokens)) > 4
        (received,) = set(observed.glob("*.received")) - before
        assert received.read_text() == received.with_suffix(".sent").read_text()


def test_what_arrives_is_what_decode_goes_on_from(fp8: Two) -> None:
    prefill, decode = fp8
    prompt = random_prompt(100)
    flip = prefill.log.parent / "observed" / FLIP
    flip.touch()
    try:
        assert handed_over(prefill, decode, prompt)[0] != complete(prefill, prompt).token_ids
    finally:
        flip.unlink()
