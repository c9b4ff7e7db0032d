"""Draft heads for a tiny model, made of its own weights, so that many of their drafts are right.

A head sees each token one place ahead of the model, and the model's output for the one before. These heads
look only at the token and compute as the model would, so the prompt must be in their cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]


def save_eagle(model: Path, folder: Path) -> Path:
    """Writes a head of as many layers as the Llama at ``model`` has to ``folder``, and returns that."""
    config, weights = _read(model)
    embeddings = weights["model.embed_tokens.weight"]
    head = _unscaled(weights, "model.layers.", "layers.", embeddings)
    # Its first layer takes its input as it comes.
    del head["layers.0.input_layernorm.weight"]
    head["embed_tokens.weight"] = embeddings / _sizes(embeddings)
    head["fc.weight"] = torch.eye(config["hidden_size"], 2 * config["hidden_size"])
    return _write(folder, model, config, head)


def save_mtp(model: Path, folder: Path) -> Path:
    """Writes the first layer of the Llama at ``model``, and one that predicts for it, to ``folder``."""
    config, weights = _read(model)
    size = config["hidden_size"]
    kept = {name: each for name, each in weights.items() if ".layers." not in name or ".layers.0." in name}
    for name in ("q", "k", "v"):
        projection = f"model.layers.0.self_attn.{name}_proj"
        kept[f"{projection}.bias"] = torch.zeros(len(kept[f"{projection}.weight"]))
    embeddings = kept["model.embed_tokens.weight"]
    kept |= _unscaled(kept, "model.layers.0.", "model.mtp_layers.0.", embeddings)
    kept["model.mtp_layers.0.input_proj.weight"] = torch.eye(size, 2 * size).roll(size, 1)
    for name in ("token", "hidden", "final"):
        kept[f"model.mtp_layers.0.{name}_layernorm.weight"] = torch.ones(size)
    own = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _write(folder, model, {**config, **own, "num_hidden_layers": 1}, kept)


def save_wider(model: Path, folder: Path) -> Path:
    """Writes the same model with a pair of keys and values for each of its queries to ``folder``."""
    config, weights = _read(model)
    times = config["num_attention_heads"] // config["num_key_value_heads"]
    wider = {
        name: each.reshape(-1, config["head_dim"], *each.shape[1:]).repeat_interleave(times, 0).flatten(0, 1)
        if name.endswith(("k_proj.weight", "v_proj.weight"))
        else each
        for name, each in weights.items()
    }
    return _write(folder, model, {**config, "num_key_value_heads": config["num_attention_heads"]}, wider)


def _read(model: Path) -> tuple[dict[str, Any], Weights]:
    return json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")


def _write(folder: Path, model: Path, config: dict[str, Any], weights: Weights) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((model / name).read_text())
    return folder


def _sizes(embeddings: torch.Tensor) -> torch.Tensor:
    return embeddings.square().mean(1, keepdim=True).sqrt()


def _unscaled(weights: Weights, prefix: str, new_prefix: str, embeddings: torch.Tensor) -> Weights:
    """Returns layers that compute from normalized embeddings what these compute from embeddings."""
    scale = _sizes(embeddings).mean()
    return {
        name.replace(prefix, new_prefix): each / scale
        if name.endswith(("o_proj.weight", "down_proj.weight"))
        else each.clone()
        for name, each in weights.items()
        if name.startswith(prefix)
    }


@dataclass(frozen=True)
class Draft:
    """One kind.

    Attributes
    ----------
    method
        As the engine is told.
    save
        Makes it for the Llama in the first folder, in the second.
    num_heads
        Heads of all layers of the cache, including the draft's own.
    num_drafted
        Tokens drafted at a time: a predicting layer was trained to predict one.
    has_model
        Whether the folder that it is saved to holds the model, too.
    """

    method: str
    save: Callable[[Path, Path], Path]
    num_heads: int
    num_drafted: int
    has_model: bool = False


DRAFTS: Final = {
    "eagle": Draft("eagle", save_eagle, (4 + 4) * 4, 3),
    "mtp": Draft("mtp", save_mtp, (1 + 1) * 4, 1, has_model=True),
    "wider": Draft("draft_model", save_wider, 4 * 4 + 4 * 8, 3),
}
