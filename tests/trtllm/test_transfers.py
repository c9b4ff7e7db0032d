"""Prompts that one engine computes and another continues, with every byte checked."""

from __future__ import annotations

import pytest

from tests.trtllm.engines import PATIENCE, Engine, expected, free_ports, pair, prompt_of
from tests.trtllm.executor import BLOCK_SIZE, NUM_HEADS, WINDOW, Options

KINDS = [
    ("older", "tensor", 1),
    ("newer", "tensor", 2),
    ("older", "latent", 2),
    ("newer", "layout", 2),
]


def is_lacking(kind: str, num_tokens: int) -> bool:
    """Whether prefill gave back a block that decode's last token sees: one length in four, with a window."""
    return kind == "layout" and num_tokens >= WINDOW and not (num_tokens - WINDOW + 1) % BLOCK_SIZE


@pytest.mark.parametrize(("release", "kind", "tp_size"), KINDS)
def test_decode_goes_on_with_what_prefill_has_computed(
    release: str, kind: str, tp_size: int, seed: int
) -> None:
    # They end at every place of a block.
    lengths = [2, 23, 24, 25, 42]
    with pair(release=release, kind=kind, tp_size=tp_size) as (prefill, decode):
        for at, num_tokens in enumerate(lengths):
            prompt = prompt_of(num_tokens, seed + at)
            prefill.submit(at, prompt)
            assert prefill.answer(at).tokens == expected(prompt, 1)
            decode.submit(at, prompt, max_new_tokens=5)
        for at, num_tokens in enumerate(lengths):
            answer = decode.answer(at)
            assert answer.tokens == expected(prompt_of(num_tokens, seed + at), 5)
            assert answer.num_matched == (0 if is_lacking(kind, num_tokens) else num_tokens - 1)
        prefill.wait_empty()
        assert not decode.has_failed_loads()
        decode.wait_empty()


@pytest.mark.parametrize(
    ("tp_size", "decode_tp_size"), [(1, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_engines_of_unlike_size_exchange_heads_where_they_are_told_of_them(
    tp_size: int, decode_tp_size: int, seed: int
) -> None:
    heads = {"kv_heads": NUM_HEADS}
    with pair(heads, heads, decode_tp_size, tp_size=tp_size) as (prefill, decode):
        for at in range(4):
            prompt = prompt_of(20 + at, seed + at)
            prefill.submit(at, prompt)
            prefill.answer(at)
            decode.submit(at, prompt, 3)
            answer = decode.answer(at)
            assert (answer.tokens, answer.num_matched) == (expected(prompt, 3), 19 + at)
        prefill.wait_empty()
        assert not decode.has_failed_loads()
        decode.wait_empty()


def test_engines_of_unlike_size_that_are_not_told_of_heads_exchange_nothing(seed: int) -> None:
    prompt = prompt_of(20, seed)
    with pair({"lease_ttl_s": 1.0}, decode_tp_size=2) as (prefill, decode):
        prefill.submit(0, prompt)
        prefill.answer(0)
        decode.submit(0, prompt, 3)
        answer = decode.answer(0)
        assert (answer.tokens, answer.num_matched) == (expected(prompt, 3), 0)
        prefill.wait_empty()
        assert not decode.has_failed_loads()
        decode.wait_empty()


@pytest.mark.parametrize("kind", ["tensor", "layout"])
def test_a_prompt_that_prefill_computes_in_chunks_arrives_whole(kind: str, seed: int) -> None:
    prompts = [prompt_of(num_tokens, seed + num_tokens) for num_tokens in (30, 31, 44)]
    with pair(release="newer", kind=kind, chunk_tokens=7) as (prefill, decode):
        for at, prompt in enumerate(prompts):
            prefill.submit(at, prompt)
        for at, prompt in enumerate(prompts):
            prefill.answer(at)
            decode.submit(at, prompt, max_new_tokens=3)
        for at, prompt in enumerate(prompts):
            answer = decode.answer(at)
            assert (answer.tokens, answer.num_matched) == (expected(prompt, 3), len(prompt) - 1)
        prefill.wait_empty()
        assert not decode.has_failed_loads()
        decode.wait_empty()


def test_what_decode_has_itself_is_not_brought(seed: int) -> None:
    prompt = prompt_of(40, seed)
    with pair() as (prefill, decode):
        for at, num_local in enumerate([0, 8, 10, 39]):
            prefill.submit(at, prompt)
            prefill.answer(at)
            decode.submit(at, prompt, 4, num_local)
            answer = decode.answer(at)
            assert (answer.tokens, answer.num_matched) == (expected(prompt, 4), 39 - num_local)
            prefill.wait_empty()
        (brought,) = decode.counts("num_pages")
        assert brought == {"pull": [10, 8, 8]}
        decode.wait_empty()


def test_prompts_that_nobody_keeps_are_computed(seed: int) -> None:
    prompt = prompt_of(20, seed)
    with pair() as (prefill, decode):
        prefill.submit(0, prompt, salt="one")
        prefill.answer(0)
        # Other tokens, the same tokens with another salt, and a prompt that was already fetched.
        for at, (tokens, salt) in enumerate([(prompt[:-1], None), (prompt, None), (prompt, "two")]):
            decode.submit(at, tokens, 2, salt=salt)
            answer = decode.answer(at)
            assert (answer.tokens, answer.num_matched) == (expected(tokens, 2, salt), 0)
        for at, num_matched in ((3, 19), (4, 0)):
            decode.submit(at, prompt, 2, salt="one")
            answer = decode.answer(at)
            assert (answer.tokens, answer.num_matched) == (expected(prompt, 2, "one"), num_matched)
        prefill.wait_empty()
        assert not decode.has_failed_loads()
        decode.wait_empty()


def test_of_equal_prompts_each_is_brought_once(seed: int) -> None:
    prompt = prompt_of(21, seed)
    with pair() as (prefill, decode):
        for at in range(3):
            prefill.submit(at, prompt)
            prefill.answer(at)
        for at in range(4):
            decode.submit(at, prompt, 2)
        assert sorted(decode.answer(at).num_matched for at in range(4)) == [0, 20, 20, 20]
        assert all(decode.answers[at].tokens == expected(prompt, 2) for at in range(4))
        prefill.wait_empty()
        assert not decode.has_failed_loads()
        decode.wait_empty()


def test_who_asks_while_a_prompt_is_computed_waits_for_it(seed: int) -> None:
    prompt = prompt_of(400, seed)
    with pair(num_blocks=128, chunk_tokens=4) as (prefill, decode):
        prefill.submit(0, prompt_of(8, seed + 1))
        prefill.answer(0)
        decode.submit(0, prompt_of(8, seed + 1))
        assert decode.answer(0).num_matched == 7
        prefill.submit(1, prompt)
        # Its load is still running when a later request has its answer.
        prefill.submit(2, [1, 2, 3])
        prefill.answer(2)
        decode.submit(1, prompt, 2)
        answer = decode.answer(1)
        assert (answer.tokens, answer.num_matched) == (expected(prompt, 2), 399)
        assert not decode.has_failed_loads()
        decode.wait_empty()


def test_two_engines_bring_each_other_what_they_have(seed: int) -> None:
    ports = [free_ports(2), free_ports(2)]
    settings = [
        {**PATIENCE, "role": "both", "port": ports[at], "prefills": [f"tcp://127.0.0.1:{ports[1 - at]}"]}
        for at in range(2)
    ]
    settings[0]["lease_ttl_s"] = settings[1]["lease_ttl_s"] = 3.0
    settings[0]["lookup_timeout_s"] = settings[1]["lookup_timeout_s"] = 1.0
    engines = [Engine(Options(own, "newer")) for own in settings]
    try:
        for each in engines:
            each.wait_started()
        for at in range(4):
            one, other = engines[at % 2], engines[1 - at % 2]
            prompt = prompt_of(18 + at, seed + at)
            one.submit(at, prompt)
            assert one.answer(at).num_matched == 0
            other.submit(at, prompt, 3)
            answer = other.answer(at)
            assert (answer.tokens, answer.num_matched) == (expected(prompt, 3), len(prompt) - 1)
        for each in engines:
            assert not each.has_failed_loads()
            each.wait_empty()
            each.close()
    finally:
        for each in engines:
            each.kill()


def flipped(seed: int) -> None:
    prompt = prompt_of(20, seed)
    with pair() as (prefill, decode):
        prefill.submit(0, prompt)
        prefill.answer(0)
        prefill.tell("flip")
        assert prefill.ask("left")
        decode.submit(0, prompt)
        decode.answer(0)


def test_a_byte_that_is_not_prefills_is_noticed(seed: int) -> None:
    """A control: if nothing were checked, every test here would pass."""
    with pytest.raises(AssertionError, match="are not what was computed"):
        flipped(seed)
