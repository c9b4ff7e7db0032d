"""Shapes of the KV caches of real models, with the file that each was read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

from kvxfer.bench.errors import BenchError
from kvxfer.bench.run.options import Option

#: All of these models keep their cache in bfloat16 by default.
ELEMENT_NBYTES = 2
# Of Qwen3-Next: linear_num_key_heads, the smaller of its two numbers of heads.
_STATE_HEADS = 16


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose caches are counted alike: they share block tables, and are one region.

    ``layers`` are the model's. A block is ``pages_per_layer`` pages in each of them; it holds
    ``tokens_per_block`` tokens, or the whole state of one request where that is 0.
    """

    name: str
    layers: tuple[int, ...]
    pages_per_layer: int
    page_nbytes: int
    tokens_per_block: int
    #: Tokens that the next one can see, itself included; 0: all before it.
    window: int = 0

    @property
    def is_state(self) -> bool:
        """An opaque row for each request, whatever its length, instead of pages of tokens."""
        return self.tokens_per_block == 0

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.pages_per_layer * self.page_nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers of the group."""
        return len(self.layers) * self.layer_nbytes

    def blocks_of(self, num_tokens: int) -> range:
        """Returns the request's logical blocks that decode needs: with a window, the last ones alone."""
        if self.is_state:
            return range(1)
        unseen = max(0, num_tokens - self.window + 1) if self.window else 0
        return range(unseen // self.tokens_per_block, -(-num_tokens // self.tokens_per_block))

    def most_blocks(self, max_tokens: int) -> int:
        """Blocks that a request of at most ``max_tokens`` can need."""
        if self.is_state:
            return 1
        blocks = -(-max_tokens // self.tokens_per_block)
        # A window that begins within a block touches one more.
        return min(blocks, -(-self.window // self.tokens_per_block) + 1) if self.window else blocks


@dataclass(frozen=True)
class ModelShape:
    """What one rank keeps of a model's KV cache.

    A block holds ``tokens_per_block`` tokens of every layer that keeps tokens. In one layer it
    consists of ``num_kv`` pages (keys, values; one for a latent cache), each
    ``[tokens, heads, head_dim]``.

    Where only some layers attend to every token, ``is_full`` says which; the others see the last
    ``window`` tokens, or keep ``state_nbytes`` for each request instead of tokens.
    """

    name: str
    num_layers: int
    num_kv: int
    num_heads: int
    head_dim: int
    repository: str
    tokens_per_block: int = 16  # the default of vLLM and SGLang's usual setting; TensorRT-LLM's is 32 or 64
    is_full: Callable[[int], bool] = lambda _: True
    window: int = 0
    state_nbytes: int = 0

    @property
    def source(self) -> str:
        """Where the numbers are from."""
        return f"https://huggingface.co/{self.repository}/blob/main/config.json"

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by the way in which they are counted; those that attend to every token first."""
        layers: dict[bool, tuple[int, ...]] = {
            full: tuple(layer for layer in range(self.num_layers) if self.is_full(layer) == full)
            for full in (True, False)
        }
        pages = self.num_kv, self.page_nbytes, self.tokens_per_block
        full = LayerGroup("kv", layers[True], *pages)
        if not layers[False]:
            return (full,)
        if self.state_nbytes:
            return full, LayerGroup("state", layers[False], 1, self.state_nbytes, 0)
        return full, LayerGroup("kv-window", layers[False], *pages, self.window)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model: its group, and its number within the group."""
        found = {
            layer: (group, number)
            for group, one in enumerate(self.groups)
            for number, layer in enumerate(one.layers)
        }
        return tuple(found[layer] for layer in range(self.num_layers))

    @property
    def is_latent(self) -> bool:
        """One latent vector a token, shared by all heads (MLA), instead of keys and values."""
        return self.num_kv == 1

    @property
    def page_nbytes(self) -> int:
        """Contiguous bytes of one block in one layer, keys or values."""
        return self.tokens_per_block * self.num_heads * self.head_dim * ELEMENT_NBYTES

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers that keep tokens."""
        return sum(group.block_nbytes for group in self.groups if not group.is_state)

    def request_nbytes(self, num_tokens: int) -> int:
        """Bytes that decode needs of a request."""
        return sum(len(group.blocks_of(num_tokens)) * group.block_nbytes for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens; the last one may be partly used."""
        return -(-num_tokens // self.tokens_per_block)

    def slice(self, tp: int) -> ModelShape:
        """Returns what one of ``tp`` tensor-parallel ranks keeps.

        KV heads are divided among the ranks, and repeated where there are more ranks than heads;
        a latent cache is the same on every rank. The heads of a state are more, and divided.
        """
        if self.is_latent:
            return self
        heads: tuple[tuple[str, int, int, int], ...] = (
            ("KV", max(self.num_heads, tp), min(self.num_heads, tp), self.num_heads),
        )
        if self.state_nbytes:
            heads += (("state", _STATE_HEADS, tp, _STATE_HEADS),)
        for kind, most, least, count in heads:
            if most % least:
                raise BenchError(f"--tp {tp} does not divide the {count} {kind} heads of {self.name} evenly")
        return replace(self, num_heads=max(1, self.num_heads // tp), state_nbytes=self.state_nbytes // tp)


def _gated_delta_net_nbytes(key_heads: int, value_heads: int, head_dim: int, conv_kernel: int) -> int:
    """Bytes that a gated delta net layer keeps of a request, both parts in bfloat16 (vLLM's default).

    The recurrent state is [value_heads, head_dim, head_dim]; the convolution keeps the inputs of the
    steps before: queries and keys of ``key_heads``, values of ``value_heads``.
    """
    recurrent = value_heads * head_dim * head_dim
    convolution = (conv_kernel - 1) * (2 * key_heads + value_heads) * head_dim
    return (recurrent + convolution) * ELEMENT_NBYTES


_SHAPES = (
    # num_hidden_layers, num_key_value_heads, hidden_size / num_attention_heads
    ModelShape("Llama-3.1-8B", 32, 2, 8, 128, "meta-llama/Llama-3.1-8B"),
    ModelShape("Llama-3.1-70B", 80, 2, 8, 128, "meta-llama/Llama-3.1-70B"),
    # num_hidden_layers, num_key_value_heads, head_dim
    ModelShape("Qwen3-30B-A3B", 48, 2, 4, 128, "Qwen/Qwen3-30B-A3B"),
    # 576 = kv_lora_rank 512 + qk_rope_head_dim 64
    ModelShape("DeepSeek-V3", 61, 1, 1, 576, "deepseek-ai/DeepSeek-V3"),
    # text_config; sliding_window_pattern 6: every sixth layer is full
    ModelShape(
        "Gemma-3-27B", 62, 2, 16, 128, "google/gemma-3-27b-it", is_full=lambda i: i % 6 == 5, window=1024
    ),
    # layer_types: sliding_attention, full_attention, sliding_attention, ...
    ModelShape("gpt-oss-120b", 36, 2, 8, 64, "openai/gpt-oss-120b", is_full=lambda i: i % 2 == 1, window=128),
    # full_attention_interval 4; linear_num_key_heads, linear_num_value_heads, head dims,
    # linear_conv_kernel_dim
    ModelShape(
        "Qwen3-Next-80B-A3B",
        48,
        2,
        2,
        256,
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        is_full=lambda i: i % 4 == 3,
        state_nbytes=_gated_delta_net_nbytes(_STATE_HEADS, 32, 128, 4),
    ),
)
MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
Shape = Annotated[str, Option(f"Of layouts: {', '.join(MODELS)}")]


def model(name: str, tp: int = 1) -> ModelShape:
    """Returns one rank's shape of the model ``name`` (case does not matter)."""
    for known, shape in MODELS.items():
        if known.lower() == name.lower():
            return shape.slice(tp)
    raise BenchError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
