"""Prompts that one engine computes and another goes on with, every byte of which is looked at."""

from __future__ import annotations

import pytest

from tests.trtllm.engines import expected, pair, prompt_of

KINDS = [
    ("older", "tensor", 1),
    ("newer", "tensor", 2),
    ("older", "latent", 2),
    ("newer", "layout", 2),
]


@pytest.mark.parametrize(("release", "kind", "tp_size"), KINDS)
def test_decode_goes_on_with_what_prefill_has_computed(
    release: str, kind: str, tp_size: int, seed: int
) -> None:
    with pair(release=release, kind=kind, tp_size=tp_size) as (prefill, decode):
        # The lengths end at every place of a block; two prompts have blocks at once, in other orders.
        for at, num_tokens in enumerate([2, 23, 24, 25, 41]):
            prompt = prompt_of(num_tokens, seed + at)
            prefill.submit(at, prompt)
            assert prefill.answer(at).tokens == expected(prompt, 1)
            decode.submit(at, prompt, max_new_tokens=5)
        for at, num_tokens in enumerate([2, 23, 24, 25, 41]):
            answer = decode.answer(at)
            assert answer.tokens == expected(prompt_of(num_tokens, seed + at), 5)
            if kind != "layout":
                assert answer.num_matched == num_tokens - 1
        prefill.wait_empty()
        decode.wait_empty()
