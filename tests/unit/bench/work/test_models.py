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
    assert shape.token_nbytes == token_nbytes
    assert shape.block_nbytes == 16 * token_nbytes


def test_every_model_names_its_source() -> None:
    assert all(shape.source.startswith("https://") for shape in MODELS.values())


def test_name_is_found_whatever_its_case() -> None:
    assert model("llama-3.1-8b").name == "Llama-3.1-8B"


def test_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(BenchError, match=r"unknown model 'GPT-2'; known are Llama-3\.1-8B, .*DeepSeek-V3"):
        model("GPT-2")


def test_ranks_share_the_heads_and_repeat_them_beyond() -> None:
    assert model("Llama-3.1-8B", tp=2).num_heads == 4
    assert model("Llama-3.1-8B", tp=16).num_heads == 1


def test_latent_cache_is_whole_on_every_rank() -> None:
    assert model("DeepSeek-V3", tp=8).block_nbytes == model("DeepSeek-V3").block_nbytes


@pytest.mark.parametrize("tp", [0, -1, 3, 12])
def test_uneven_split_of_heads_is_refused(tp: int) -> None:
    with pytest.raises(BenchError, match="--tp"):
        model("Llama-3.1-8B", tp=tp)


def test_blocks_are_rounded_up() -> None:
    shape = model("Qwen3-30B-A3B")
    assert [shape.blocks_for(n) for n in (1, 16, 17)] == [1, 1, 2]


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


def test_every_sixth_layer_of_gemma_3_is_full() -> None:
    full, window = model("Gemma-3-27B").groups
    assert full.layers == (5, 11, 17, 23, 29, 35, 41, 47, 53, 59)
    assert (len(window.layers), window.window) == (52, 1024)


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


def test_state_heads_are_divided_evenly() -> None:
    with pytest.raises(BenchError, match="--tp 32 does not divide the 16 state heads"):
        model("Qwen3-Next-80B-A3B", tp=32)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_its_place(name: str) -> None:
    shape = model(name)
    assert len(shape.places) == shape.num_layers
    for layer, (group, number) in enumerate(shape.places):
        assert shape.groups[group].layers[number] == layer
