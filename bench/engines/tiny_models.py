"""Models of a few megabytes with random weights, for real engines: the cache's shapes without the cost.

Their output is noise, but it depends on every token before it: if one wrong block reaches the attention,
other tokens come out. transformers and tokenizers create them; both come with the engines.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: One token for each character, so that prompts can be counted and outputs can be read.
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?'\"()-+*/=<>@#%&_$\n"
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_PAD, _BOS, _EOS, _UNK = range(4)
# A multiple of 64, since engines round vocabularies up to one.
VOCABULARY = 128
MAX_TOKENS = 4096

# With 0.02, which trained models start from, one token is repeated for ever. From 0.12 on, 32 greedy
# tokens have 20 to 30 different values, and changing one letter 300 tokens earlier changes them.
_STANDARD_DEVIATION = 0.15
# If queries and keys are normalized, the weights of their norms decide where attention goes.
_ATTENTION_NORM_WEIGHT = 2.0
# With default values, states forget a token within three tokens. With this they remember some twenty.
_STATE_DECAY_LOG = -3.0

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "pad_token_id": _PAD,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
    # bfloat16 can die of an illegal instruction where the CPU has AMX, and has more ties.
    "dtype": "float32",
}

#: name -> (transformers' configuration class, its arguments beside the common ones)
Models = Mapping[str, tuple[str, dict[str, Any]]]
MODELS: Models = {
    "llama": ("LlamaConfig", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}),
    # Pages of 64 KiB in 32 layers, as many and as large as those of Llama-3.1-8B in bfloat16 with blocks
    # of 16 tokens: 64 KiB a token to hand over. Everything else is as small as possible.
    "llama-pages": (
        "LlamaConfig",
        {
            "num_hidden_layers": 32,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 32,
        },
    ),
}


def save(name: str, folder: Path, seed: int = 1, models: Models = MODELS) -> Path:
    """Creates a model and its tokenizer, writes both to ``folder`` for engines, and returns the folder.

    Creates the folder if need be. Does nothing if it has a model of this name and seed already.
    """
    constants = [_STANDARD_DEVIATION, _ATTENTION_NORM_WEIGHT, _STATE_DECAY_LOG]
    label = json.dumps([name, seed, models[name], _COMMON, *constants])
    stamp = folder / "tiny-model.json"
    if stamp.exists() and stamp.read_text() == label:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _save_weights(folder, seed, *models[name])
    _save_tokenizer(folder)
    stamp.write_text(label)
    return folder


def _save_weights(folder: Path, seed: int, config_class: str, arguments: dict[str, Any]) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, config_class)(**{**_COMMON, **arguments})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            # Other vectors are norms and biases; their default values are right.
            if parameter.ndim > 1:
                parameter.normal_(0.0, _STANDARD_DEVIATION)
            elif label.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(_ATTENTION_NORM_WEIGHT)
            elif label.endswith("A_log"):
                parameter.fill_(_STATE_DECAY_LOG)
        if config.tie_word_embeddings:
            # Such models scale embeddings up by this, so the last token would outweigh the layers.
            model.get_input_embeddings().weight /= config.hidden_size**0.5
        # Tokens that are not letters are never the most likely, so that no answer ends early.
        head = model.get_output_embeddings().weight
        head[: len(_SPECIAL)] = 0.0
        head[len(_SPECIAL) + len(ALPHABET) :] = 0.0
    model.save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    tokenizers = importlib.import_module("tokenizers")
    spare = [f"<spare{number}>" for number in range(VOCABULARY - len(_SPECIAL) - len(ALPHABET))]
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *ALPHABET, *spare])}
    # Without merges, one character is one token.
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token=_SPECIAL[_UNK])
    )
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": MAX_TOKENS,
                "pad_token": _SPECIAL[_PAD],
                "bos_token": _SPECIAL[_BOS],
                "eos_token": _SPECIAL[_EOS],
                "unk_token": _SPECIAL[_UNK],
                "chat_template": _CHAT_TEMPLATE,
            }
        )
    )
