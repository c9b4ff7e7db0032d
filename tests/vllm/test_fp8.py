"""A cache in fp8 under real engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.vllm_server import VllmServer
from tests.vllm.engine import random_prompt, start_pair
from tests.vllm.fp8_attention import ARGUMENTS, attention_of
from tests.vllm.handover import assert_flipped_bits_change_the_tokens, assert_handed_over

# In the daily run, `test_cache_orders.py` moves such bytes between workers.
pytestmark = pytest.mark.slow

Two = tuple[VllmServer, VllmServer]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("fp8")
    weights = tiny_models.save("llama", folder / "model")
    with start_pair(weights, folder, arguments=ARGUMENTS, environment=attention_of(folder)) as pair:
        yield pair


@pytest.mark.parametrize("how", ["pull", "push"])
@pytest.mark.parametrize("length", [20, 64, 70, 500])
def test_tokens_are_those_of_one_engine(fp8: Two, length: int, how: str) -> None:
    assert_handed_over(*fp8, random_prompt(length), how)


def test_what_arrives_is_what_decode_goes_on_from(fp8: Two) -> None:
    assert_flipped_bits_change_the_tokens(*fp8, random_prompt(100))
