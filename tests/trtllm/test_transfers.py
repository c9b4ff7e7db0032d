"""Prompts that one engine computes and another continues, with every byte checked."""

from __future__ import annotations

import pytest

from tests.trtllm.cache import BLOCK_SIZE, NUM_HEADS, WINDOW, Options
from tests.trtllm.engines import PATIENCE, Remote, expected, free_ports, local, pair, prompt_of, require
from tests.trtllm.replay import Engine, Waits


def require_empty(prefill: Waits, decode: Engine) -> None:
    prefill.wait_empty()
    assert not decode.has_failed_loads()
    decode.wait_empty()


HEADS = {"kv_heads": NUM_HEADS}


def is_lacking(kind: str, num_tokens: int) -> bool:
    """Whether prefill gave back a block that decode's last token sees: one length in four, with a window."""
    return kind == "layout" and num_tokens >= WINDOW and not (num_tokens - WINDOW + 1) % BLOCK_SIZE


@pytest.mark.parametrize(
    ("release", "kind", "tp_size", "decode_tp_size", "settings"),
    [
        ("older", "tensor", 1, 1, {}),
        ("newer", "tensor", 2, 2, {}),
        ("older", "latent", 2, 2, {}),
        ("newer", "layout", 2, 2, {}),
        # Engines of unlike size exchange heads if they are told of them.
        ("older", "tensor", 1, 2, HEADS),
        ("older", "tensor", 2, 1, HEADS),
        ("older", "tensor", 2, 4, HEADS),
    ],
)
def test_decode_goes_on_with_what_prefill_has_computed(
    release: str, kind: str, tp_size: int, decode_tp_size: int, settings: dict[str, int], seed: int
) -> None:
    # They end at every place of a block.
    prompts = [prompt_of(num_tokens, seed + num_tokens) for num_tokens in (2, 23, 24, 25, 42)]
    options = {"release": release, "kind": kind, "tp_size": tp_size}
    with pair(settings, settings, decode_tp_size, **options) as (prefill, decode):
        for at, prompt in enumerate(prompts):
            assert prefill.serve(at, prompt).tokens == expected(prompt, 1)
            decode.submit(at, prompt, 5)
        for at, prompt in enumerate(prompts):
            require(decode.answer(at), prompt, 5, 0 if is_lacking(kind, len(prompt)) else len(prompt) - 1)
        require_empty(prefill, decode)


def test_engines_of_unlike_size_that_are_not_told_of_heads_exchange_nothing(seed: int) -> None:
    prompt = prompt_of(20, seed)
    with pair({"lease_ttl_s": 1.0}, decode_tp_size=2) as (prefill, decode):
        prefill.serve(0, prompt)
        require(decode.serve(0, prompt, 3), prompt, 3, 0)
        require_empty(prefill, decode)


@pytest.mark.parametrize("kind", ["tensor", "layout"])
def test_a_prompt_that_prefill_computes_in_chunks_arrives_whole(kind: str, seed: int) -> None:
    prompts = [prompt_of(num_tokens, seed + num_tokens) for num_tokens in (30, 31, 44)]
    with pair(release="newer", kind=kind, chunk_tokens=7) as (prefill, decode):
        for at, prompt in enumerate(prompts):
            prefill.submit(at, prompt)
        for at, prompt in enumerate(prompts):
            prefill.answer(at)
            decode.submit(at, prompt, 3)
        for at, prompt in enumerate(prompts):
            require(decode.answer(at), prompt, 3, len(prompt) - 1)
        require_empty(prefill, decode)


def test_what_decode_has_itself_is_not_brought(seed: int) -> None:
    prompt = prompt_of(40, seed)
    with pair() as (prefill, decode):
        for at, num_local in enumerate([0, 8, 10, 39]):
            prefill.serve(at, prompt)
            require(decode.serve(at, prompt, 4, num_local), prompt, 4, 39 - num_local)
            prefill.wait_empty()
        assert decode.counts("num_pages") == [{"pull": [10, 8, 8]}]
        decode.wait_empty()


def test_prompts_that_nobody_keeps_are_computed(seed: int) -> None:
    prompt = prompt_of(20, seed)
    with pair() as (prefill, decode):
        prefill.serve(0, prompt, salt="one")
        # Other tokens, the same tokens with another salt, and a prompt that was already fetched.
        for at, (tokens, salt, num_matched) in enumerate(
            [
                (prompt[:-1], None, 0),
                (prompt, None, 0),
                (prompt, "two", 0),
                (prompt, "one", 19),
                (prompt, "one", 0),
            ]
        ):
            require(decode.serve(at, tokens, 2, salt=salt), tokens, 2, num_matched, salt)
        require_empty(prefill, decode)


def test_two_engines_bring_each_other_what_they_have(seed: int) -> None:
    ports = [free_ports(2), free_ports(2)]
    hasty = {**PATIENCE, "role": "both", "lease_ttl_s": 3.0, "lookup_timeout_s": 1.0}
    options = [
        Options({**hasty, "port": ports[at], "prefills": [f"tcp://127.0.0.1:{ports[1 - at]}"]}, "newer")
        for at in range(2)
    ]
    first = Remote(options[0])
    try:
        with local(options[1]) as second:
            first.wait_started()
            engines: list[Waits] = [first, second]
            for at in range(4):
                one, other = engines[at % 2], engines[1 - at % 2]
                prompt = prompt_of(18 + at, seed + at)
                require(one.serve(at, prompt), prompt, 1, 0)
                require(other.serve(at, prompt, 3), prompt, 3, len(prompt) - 1)
            for each in engines:
                assert not each.has_failed_loads()
                each.wait_empty()
        first.close()
    finally:
        first.kill()


def test_a_byte_that_is_not_prefills_is_noticed(seed: int) -> None:
    """A control: if nothing were checked, every test here would pass."""
    prompt = prompt_of(20, seed)
    with pair() as (prefill, decode):
        prefill.serve(0, prompt)
        prefill.ask("flip")
        with pytest.raises(AssertionError, match="are not what was computed"):
            decode.serve(0, prompt)
