"""SGLang continues a prompt that vLLM computed: pages and logits equal those of SGLang's own prefill.

Both engines compute the same float32 model, each in its own order of additions. So their results are equal
within float32's rounding, which accumulates over layers.
"""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.between.conftest import BLOCK_TOKENS
from tests.between.process import EngineProcess
from tests.seeds import next_seed

NUM_STEPS: Final = 4
# Relative to the largest element. The largest difference seen in hundreds of prompts is 1.2e-5, in pages and
# in logits.
TOLERANCE: Final = 5e-5
# A changed bit counts as visible if logits change by this many times the tolerance. We saw 20,000 and more.
MANY: Final = 1000


def prompt_of(num_tokens: int) -> list[int]:
    """Returns tokens that are letters."""
    draw = random.Random(next_seed("prompt", num_tokens))
    return [draw.randrange(4, 90) for _ in range(num_tokens)]


def difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Returns the largest difference as a part of the largest element; NaN where either has one."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def logits(answer: dict[str, Any]) -> NDArray[np.float32]:
    """Returns those of each step behind the prompt."""
    return np.array(answer["steps"], np.float32)


@pytest.mark.parametrize("num_tokens", [1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 100, 900])
def test_pages_and_logits_are_those_of_one_engine(
    prefill: EngineProcess, decode: EngineProcess, page_tokens: int, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    first, params = prefill.call("prefill", prompt)
    own = decode.call("compute", prompt, first, NUM_STEPS)
    # Both continue with the same tokens: of two tokens whose logits are equal within rounding, each engine
    # might choose another.
    brought = decode.call("take_over", prompt, params, own["tokens"][:NUM_STEPS])
    # Keys and values are a region each. Values that were not fetched would be NaN.
    assert brought["num_pages"] == 2 * -(-num_tokens // page_tokens)
    assert max(own["prompt"]) - own["prompt"][first] < TOLERANCE * max(own["prompt"])
    ours, theirs = np.load(brought["pages"]), np.load(own["pages"])
    assert ours.shape[1] == num_tokens
    in_pages, in_logits = difference(ours, theirs), difference(logits(brought), logits(own))
    print(f"{num_tokens} tokens: pages differ by {in_pages:.1e}, logits by {in_logits:.1e} of the largest")
    assert in_pages < TOLERANCE
    assert in_logits < TOLERANCE


def test_a_flipped_bit_of_a_page_shows_in_the_logits(prefill: EngineProcess, decode: EngineProcess) -> None:
    prompt = prompt_of(100)
    first, params = prefill.call("prefill", prompt)
    own = decode.call("compute", prompt, first, NUM_STEPS)
    table = params["remote_block_ids"][0]
    before, after = prefill.call("flip_a_bit", table[99 // BLOCK_TOKENS], 99 % BLOCK_TOKENS)
    assert abs(after) > 1e10 * abs(before)
    brought = decode.call("take_over", prompt, params, own["tokens"][:NUM_STEPS])
    assert brought["num_pages"] > 0
    assert difference(logits(brought), logits(own)) > MANY * TOLERANCE


def test_blocks_come_back_when_they_were_read(prefill: EngineProcess, decode: EngineProcess) -> None:
    prompt = prompt_of(100)
    # The blocks of refused requests are kept until no reader can come any more.
    others = prefill.call("num_blocks_kept")
    first, params = prefill.call("prefill", prompt)
    assert prefill.call("num_blocks_kept") == others + -(-100 // BLOCK_TOKENS)
    decode.call("take_over", prompt, params, [first])
    assert prefill.call("num_blocks_kept") == others


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"model": "another model"}, "another model"),
        ({"head_dim": 16}, "head_dim"),
        ({"total_heads": 8}, "heads"),
        ({"first_layer": 1, "total_layers": 8}, "layers"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_a_cache_of_another_model_is_refused_in_words(
    prefill: EngineProcess, decode: EngineProcess, changed: dict[str, Any], word: str
) -> None:
    prompt = prompt_of(40)
    _, params = prefill.call("prefill", prompt)
    said = decode.call("refusal", prompt, params, changed)
    print(said)
    assert "cache not loaded" in said
    assert word in said
