"""GDN's states in float32, in torch: vLLM's own kernels for the CPU compute them only in bfloat16.

An engine loads it like any plugin, in place of the code that computes one layer's tokens from its state. vLLM
itself still decides the states' layout, allocates them, assigns the blocks and keeps them. Every token is
computed separately, so the result does not depend on where a prompt is cut.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as vllms
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name


def float32_states() -> None:
    # vLLM registers it as an operator when it makes its first layer of this kind.
    vllms.cpu_gdn_attention_core = _attention


def _attention(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    of_layers: Any = context.attn_metadata
    if of_layers is None:
        return
    metadata: Any = of_layers[layer.prefix]
    num_decodes, num_requests = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
    if num_requests == 0:
        return
    slots = metadata.non_spec_state_indices_tensor[:num_requests]
    starts = metadata.non_spec_query_start_loc[: num_requests + 1]
    goes_on = torch.ones(num_requests, dtype=torch.bool)
    if metadata.has_initial_state is not None:
        goes_on[num_decodes:] = metadata.has_initial_state[num_decodes:num_requests]
    conv_states, states = layer.kv_cache
    # As in vLLM's kernels for the CPU: keys before values, in a tensor shaped for values before keys.
    states = states.view(*states.shape[:2], states.shape[3], states.shape[2])
    mixed_qkv = causal_conv1d_fn_cpu(
        mixed_qkv[: starts[-1]].T,
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        conv_states if is_conv_state_dim_first() else conv_states.transpose(1, 2),
        starts,
        slots,
        goes_on,
        layer.activation,
    ).T
    query, key, value = layer.rearrange_mixed_qkv(mixed_qkv)
    heads_per_key = value.shape[2] // key.shape[2]
    query, key = (each.repeat_interleave(heads_per_key, dim=2) for each in (query, key))
    decay = -layer.A_log.exp() * torch.nn.functional.softplus(a + layer.dt_bias)
    for at, slot in enumerate(slots.tolist()):
        mine = slice(starts[at], starts[at + 1])
        core_attn_out[mine], states[slot] = (
            each[0]
            for each in torch_recurrent_gated_delta_rule(
                query[:, mine],
                key[:, mine],
                value[:, mine],
                decay[None, mine],
                b[None, mine].sigmoid(),
                states[slot, None] if goes_on[at] else None,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        )
