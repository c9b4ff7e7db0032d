import pytest

from kvxfer.bench.errors import BenchError
from kvxfer.bench.work.models import MODELS, model


@pytest.mark.parametrize(
    ("name", "token_nbytes"),
    [
        ("Llama-3.1-8B", 32 * 2 * 8 * 128 * 2),
        ("Llama-3.1-70B", 80 * 2 * 8 * 128 * 2),
        ("Qwen3-30B-A3B", 48 * 2 * 4 * 128 * 2),
        ("DeepSeek-V3", 61 * 576 * 2),
        ("Gemma-3-27B", 62 * 2 * 16 * 128 * 2),
        ("gpt-oss-120b", 36 * 2 * 8 * 64 * 2),
        ("Qwen3-Next-80B-A3B", 12 * 2 * 2 * 256 * 2),
    ],
)
def test_bytes_of_a_token_are_those_of_the_models_config(name: str, token_nbytes: int) -> None:
    shape = model(name)
    assert shape.block_nbytes == 16 * token_nbytes
    assert shape.source.startswith("https://")


def test_ranks_share_the_heads_and_repeat_them_beyond_and_a_latent_cache_is_whole_on_each() -> None:
    assert [model("llama-3.1-8b", tp=tp).num_heads for tp in (2, 16)] == [4, 1]
    assert model("DeepSeek-V3", tp=8).block_nbytes == model("DeepSeek-V3").block_nbytes


@pytest.mark.parametrize(
    ("name", "tp", "words"),
    [
        ("Llama-3.1-8B", 3, "--tp 3 does not divide the 8 KV heads"),
        ("Llama-3.1-8B", 12, "--tp 12 does not divide"),
        ("Qwen3-Next-80B-A3B", 32, "--tp 32 does not divide the 16 state heads"),
        ("GPT-2", 1, "unknown model 'GPT-2'; known are Llama-3.1-8B"),
    ],
)
def test_what_cannot_be_is_refused_in_words(name: str, tp: int, words: str) -> None:
    with pytest.raises(BenchError) as caught:
        model(name, tp)
    assert words in str(caught.value)


def test_window_needs_the_last_blocks_alone() -> None:
    full, window = model("gpt-oss-120b").groups
    assert full.layers == tuple(range(1, 36, 2))
    assert window.layers == tuple(range(0, 36, 2))
    assert full.blocks_of(1000) == range(63)
    # The token to come sees 127 before it: 873 to 999, in blocks 54 to 62.
    assert window.blocks_of(1000) == range(54, 63)
    assert window.blocks_of(100) == range(7)
    assert [window.most_blocks(n) for n in (100, 4096)] == [7, 9]


@pytest.mark.parametrize("name", MODELS)
def test_no_request_needs_more_blocks_than_the_most(name: str) -> None:
    for group in model(name).groups:
        for num_tokens in range(1, 3000, 7):
            assert 1 <= len(group.blocks_of(num_tokens)) <= group.most_blocks(3000)


def test_state_is_one_row_a_request_whatever_its_length() -> None:
    shape = model("Qwen3-Next-80B-A3B")
    full, state = shape.groups
    assert len(full.layers) == 12
    assert full.layers[0] == 3
    # 32 heads of 128 x 128, and 3 steps of 2 x 16 + 32 heads of 128, in bfloat16.
    assert state.page_nbytes == (32 * 128 * 128 + 3 * 64 * 128) * 2
    assert state.blocks_of(1) == state.blocks_of(100_000) == range(1)
    assert shape.request_nbytes(32) == 2 * shape.block_nbytes + 36 * state.page_nbytes
    assert shape.slice(16).state_nbytes == state.page_nbytes // 16 == 68608


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_its_place(name: str) -> None:
    shape = model(name)
    assert len(shape.places) == shape.num_layers
    for layer, (group, number) in enumerate(shape.places):
        assert shape.groups[group].layers[number] == layer
