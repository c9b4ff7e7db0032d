import pytest

from kvxfer.bench.errors import BenchError
from kvxfer.bench.models import MODELS, model


@pytest.mark.parametrize(
    ("name", "token_nbytes"),
    [
        ("Llama-3.1-8B", 32 * 2 * 8 * 128 * 2),
        ("Llama-3.1-70B", 80 * 2 * 8 * 128 * 2),
        ("Qwen3-30B-A3B", 48 * 2 * 4 * 128 * 2),
        ("DeepSeek-V3", 61 * 576 * 2),
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
