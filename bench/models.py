"""Shapes of the KV caches of real models, with the file that each was read from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvxfer.bench.errors import BenchError

#: The default page of vLLM and SGLang's usual setting; TensorRT-LLM's is 32 or 64.
TOKENS_PER_BLOCK = 16
#: All of these models keep their cache in bfloat16 by default.
ELEMENT_NBYTES = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What one rank keeps of a model's KV cache.

    A block holds ``tokens_per_block`` tokens of every layer. In one layer it consists of
    ``num_kv`` pages (keys, values; one for a latent cache), each ``[tokens, heads, head_dim]``.
    """

    name: str
    num_layers: int
    num_kv: int
    num_heads: int
    head_dim: int
    source: str
    element_nbytes: int = ELEMENT_NBYTES
    tokens_per_block: int = TOKENS_PER_BLOCK
    tp: int = 1

    @property
    def is_latent(self) -> bool:
        """One latent vector a token, shared by all heads (MLA), instead of keys and values."""
        return self.num_kv == 1

    @property
    def page_nbytes(self) -> int:
        """Contiguous bytes of one block in one layer, keys or values."""
        return self.tokens_per_block * self.num_heads * self.head_dim * self.element_nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.num_kv * self.page_nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.layer_nbytes

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.block_nbytes // self.tokens_per_block

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens; the last one may be partly used."""
        return -(-num_tokens // self.tokens_per_block)

    def slice(self, tp: int) -> ModelShape:
        """Returns what one of ``tp`` tensor-parallel ranks keeps.

        KV heads are divided among the ranks, and repeated where there are more ranks than heads;
        a latent cache is the same on every rank.
        """
        if tp < 1:
            raise BenchError(f"--tp is a number of ranks, at least 1, not {tp}")
        if self.is_latent:
            return replace(self, tp=tp)
        if max(self.num_heads, tp) % min(self.num_heads, tp):
            raise BenchError(f"--tp {tp} does not divide the {self.num_heads} KV heads of {self.name} evenly")
        return replace(self, tp=tp, num_heads=max(1, self.num_heads // tp))


def _config(repository: str) -> str:
    return f"https://huggingface.co/{repository}/blob/main/config.json"


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        # num_hidden_layers, num_key_value_heads, hidden_size / num_attention_heads
        ModelShape("Llama-3.1-8B", 32, 2, 8, 128, _config("meta-llama/Llama-3.1-8B")),
        ModelShape("Llama-3.1-70B", 80, 2, 8, 128, _config("meta-llama/Llama-3.1-70B")),
        # num_hidden_layers, num_key_value_heads, head_dim
        ModelShape("Qwen3-30B-A3B", 48, 2, 4, 128, _config("Qwen/Qwen3-30B-A3B")),
        # 576 = kv_lora_rank 512 + qk_rope_head_dim 64
        ModelShape("DeepSeek-V3", 61, 1, 1, 576, _config("deepseek-ai/DeepSeek-V3")),
    )
}


def model(name: str, tp: int = 1) -> ModelShape:
    """Returns one rank's shape of the model ``name`` (case does not matter)."""
    for known, shape in MODELS.items():
        if known.lower() == name.lower():
            return shape.slice(tp)
    raise BenchError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
