"""Attention over a cache in fp8, in torch: vLLM's own kernels for the CPU need AVX-512 for it.

An engine loads it like any plugin, in place of ``CPU_ATTN``. vLLM itself still decides the cache's layout,
allocates it, assigns the blocks and saves the layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.vllm.plugins import plugin

_DTYPES: Final = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


ARGUMENTS: Final = ("--kv-cache-dtype", "fp8")


def attention_of(folder: Path) -> dict[str, str]:
    """Returns the variables with which an engine attends over such a cache, by vLLM's kernels or by this.

    The files of the plugin go into ``folder``.
    """
    if torch.cpu._is_avx512_supported():
        return {}
    return plugin(fp8_attention, folder)


def fp8_attention() -> None:
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.Fp8AttentionBackend")


class Fp8AttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Fp8Attention]:
        return Fp8Attention

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return _Builder


class _Builder(AttentionMetadataBuilder[CPUAttentionMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )


class Fp8Attention(CPUAttentionBackendImpl):
    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        keys, values = self._halves(kv_cache)
        slots = slot_mapping[: len(key)].long()
        blocks, tokens = slots // keys.shape[2], slots % keys.shape[2]
        for cache, new, scale in ((keys, key, layer._k_scale_float), (values, value, layer._v_scale_float)):
            cache[blocks, :, tokens] = (new / scale).to(_DTYPES[self.kv_cache_dtype]).view(torch.uint8)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        keys, values = self._halves(kv_cache)
        starts = attn_metadata.query_start_loc.tolist()
        for at, length in enumerate(attn_metadata.seq_lens.tolist()):
            first, end = starts[at : at + 2]
            if first == end:
                continue
            blocks = attn_metadata.block_table[at, : -(-length // keys.shape[2])].long()
            seen = torch.ones(end - first, length, dtype=torch.bool).tril(length - (end - first))
            output[first:end] = (
                torch.nn.functional.scaled_dot_product_attention(
                    query[first:end].transpose(0, 1)[None],
                    self._read(keys, blocks, length, layer._k_scale_float, query.dtype),
                    self._read(values, blocks, length, layer._v_scale_float, query.dtype),
                    attn_mask=seen,
                    scale=self.scale,
                    enable_gqa=True,
                )[0]
                .transpose(0, 1)
                .reshape(output[first:end].shape)
            )
        return output

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values as bytes, [block, head, token, dim] each."""
        num_blocks, num_heads, num_tokens, _ = kv_cache.shape
        halves = kv_cache.view(torch.uint8).view(num_blocks, num_heads, 2 * num_tokens, self.head_size)
        keys, values = halves.chunk(2, dim=2)
        return keys, values

    def _read(
        self, cache: torch.Tensor, blocks: torch.Tensor, length: int, scale: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns a request's tokens, [1, head, token, dim]."""
        numbers = cache[blocks].view(_DTYPES[self.kv_cache_dtype]).to(dtype) * scale
        return numbers.transpose(0, 1).flatten(1, 2)[None, :, :length]
