import pytest

from kvxfer.bench.work.models import model


@pytest.mark.parametrize(
    ("name", "token_nbytes"),
    [
        ("llama-3.1-8b", 32 * 2 * 8 * 128 * 2),
        ("Llama-3.1-70B", 80 * 2 * 8 * 128 * 2),
        ("Qwen3-30B-A3B", 48 * 2 * 4 * 128 * 2),
    ],
)
def test_bytes_of_a_token_are_those_of_the_models_config(name: str, token_nbytes: int) -> None:
    shape = model(name)
    assert shape.block_nbytes == 16 * token_nbytes
    assert [shape.blocks_for(num_tokens) for num_tokens in (1, 16, 17)] == [1, 1, 2]
