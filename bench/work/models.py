"""Shapes of the KV caches of real models, with the file that each was read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.options import Option

#: All of these models keep their cache in bfloat16 by default.
ELEMENT_NBYTES = 2
#: Keys and values.
NUM_KV = 2


@dataclass(frozen=True)
class ModelShape:
    """A model's KV cache: in each layer, pages of keys and of values, ``[tokens, heads, head_dim]`` each."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    repository: str
    tokens_per_block: int = 16  # the default of vLLM and SGLang's usual setting; TensorRT-LLM's is 32 or 64

    @property
    def source(self) -> str:
        """Where the numbers are from."""
        return f"https://huggingface.co/{self.repository}/blob/main/config.json"

    @property
    def page_nbytes(self) -> int:
        """Contiguous bytes of one block in one layer, keys or values."""
        return self.tokens_per_block * self.num_heads * self.head_dim * ELEMENT_NBYTES

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * NUM_KV * self.page_nbytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens; the last one may be partly used."""
        return -(-num_tokens // self.tokens_per_block)


_SHAPES = (
    # num_hidden_layers, num_key_value_heads, head_dim (hidden_size / num_attention_heads)
    ModelShape("Llama-3.1-8B", 32, 8, 128, "meta-llama/Llama-3.1-8B"),
    ModelShape("Llama-3.1-70B", 80, 8, 128, "meta-llama/Llama-3.1-70B"),
    ModelShape("Qwen3-30B-A3B", 48, 4, 128, "Qwen/Qwen3-30B-A3B"),
)
MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
Shape = Annotated[str, Option(f"Whose layouts: {', '.join(MODELS)}.", value="MODEL")]


def model(name: str) -> ModelShape:
    """Returns the shape of the model ``name`` (case does not matter)."""
    for known, shape in MODELS.items():
        if known.lower() == name.lower():
            return shape
    raise BenchError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
