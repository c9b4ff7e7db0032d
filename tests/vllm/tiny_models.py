"""Tiny models with other kinds of caches than llama's; `kvxfer.bench.engines.tiny_models` makes them."""

from __future__ import annotations

from pathlib import Path

from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.tiny_models import MAX_TOKENS

_MODELS: tiny_models.Models = {
    **tiny_models.MODELS,
    # Layers that see a window of 64 tokens and layers that see all tokens: groups with their own tables.
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    # One latent row for each token instead of keys and values; the CPU's kernel supports only 512 + 64.
    # Positions as in DeepSeek's own models: without YaRN the CPU's kernel reads separate rows of tokens as if
    # they were contiguous, and a prefill's result depends on its number of tokens.
    "deepseek": (
        "DeepseekV2Config",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "first_k_dense_replace": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": MAX_TOKENS // 4,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    # Three layers with a state for each request, and one with a cache of tokens. The CPU's kernel of such
    # states supports only these sizes, and only bfloat16 (``--dtype bfloat16``).
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    # The same with states of another kind (Mamba2), which the CPU computes in float32.
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_multiplier": 0.125,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_head": 64,
            "mamba_d_state": 32,
            "num_local_experts": 0,
            "shared_intermediate_size": 512,
        },
    ),
}


def save(name: str, folder: Path) -> Path:
    """Makes one of them and writes it to ``folder``, which is returned."""
    return tiny_models.save(name, folder, models=_MODELS)
