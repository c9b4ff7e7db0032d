"""SGLang's part of keys and values, described as vLLM's connector describes its own: elements, and a name."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import kvxfer
from kvxfer.connectors.sglang.cache_parts import CachePart

_FLOAT_NBYTES: Final = 4
# SGLang reserves its first page for padding tokens, as vLLM does with its first block.
_NULL_PAGE: Final = 0


def in_floats(part: CachePart, model: str, group: str) -> kvxfer.KVLayout:
    """Returns the layout of a part, of bytes in SGLang's words, as one of float32."""
    return replace(
        part.layout,
        dtype="float32",
        itemsize=_FLOAT_NBYTES,
        head_dim=part.layout.head_dim // _FLOAT_NBYTES,
        dim_stride=_FLOAT_NBYTES,
        null_block=_NULL_PAGE,
        model=model,
        group=group,
    )


def half_of(whole: kvxfer.KVLayout, kv: int, group: str) -> kvxfer.KVLayout:
    """Returns the layout of keys (0) or values (1) alone, over the memory of both."""
    begins = tuple(int(offset) for offset in whole.layer_offsets()[:, kv])
    return replace(whole, num_kv=1, offset=0, layer_stride=0, kv_stride=0, offsets=begins, group=group)
