"""A cache in fp8 under real engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.vllm_server import VllmServer
from tests.vllm.early_start import started
from tests.vllm.engine import random_prompt, server
from tests.vllm.fp8_attention import ARGUMENTS, attention_of
from tests.vllm.handover import assert_flipped_bits_change_the_tokens, assert_handed_over

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
@pytest.mark.parametrize("length", [20, 64, 70, 500])
def test_tokens_are_those_of_one_engine(fp8: Two, length: int, how: str) -> None:
    assert_handed_over(*fp8, random_prompt(length), how)


def test_what_arrives_is_what_decode_goes_on_from(fp8: Two) -> None:
    assert_flipped_bits_change_the_tokens(*fp8, random_prompt(100))
