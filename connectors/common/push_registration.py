"""A decode worker's registration with a prefill rank for a push: where the pages go."""

from __future__ import annotations

import base64
from typing import Annotated, Any

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from kvxfer.connectors.common.handover import MAX_GROUPS
from kvxfer.connectors.common.paging import GroupTable

_Tokens = Annotated[int, Field(ge=1, le=2**20)]


def _not_empty(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] >= bounds[1]:
        raise ValueError(f"begins at {bounds[0]} and stops at {bounds[1]}")
    return bounds


_Bound = Annotated[int, Field(ge=0, le=2**20)]
_Slice = Annotated[tuple[_Bound, _Bound], AfterValidator(_not_empty)]


def _blocks(value: Any) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return value
    if not isinstance(value, str):
        raise ValueError("is not a string")
    # Four bytes for each block id: decimal digits in JSON would be twice as long.
    return tuple(np.frombuffer(base64.b64decode(value, validate=True), "<u4").tolist())


_Blocks = Annotated[
    tuple[int, ...],
    PlainValidator(_blocks),
    PlainSerializer(lambda blocks: base64.b64encode(np.array(blocks, "<u4").tobytes()).decode()),
]


class Share(BaseModel):
    """The layers and heads of a cache group that one rank is to push; numbered model-wide."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    group: Annotated[int, Field(ge=0, lt=MAX_GROUPS)]
    layers: _Slice
    heads: _Slice


class Registration(BaseModel):
    """One reader's registration.

    Attributes
    ----------
    tag
        The tag of every write for this reader, before the group's number; 16 random bytes in hexadecimal.
    prompt
        `prompt_digest` of the request at decode.
    first_token, num_tokens
        The tokens that decode lacks: from the first to the prompt's end.
    tables, block_sizes, pages_per_block
        For each cache group, the destination blocks.
    shares
        The layers and heads that this rank is to push, once for each group of which it pushes something: a
        rank holds one slice of a group, so `kvxfer.plan.route` gives it one share.
    may_be_shared
        Whether other engines may register for the same prompt.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    tag: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    prompt: Annotated[str, Field(max_length=64)]
    first_token: Annotated[int, Field(ge=0, lt=2**31)]
    num_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    tables: Annotated[tuple[_Blocks, ...], Field(max_length=MAX_GROUPS)]
    block_sizes: Annotated[tuple[_Tokens, ...], Field(max_length=MAX_GROUPS)]
    pages_per_block: Annotated[tuple[_Tokens, ...], Field(max_length=MAX_GROUPS)]
    shares: Annotated[tuple[Share, ...], Field(max_length=MAX_GROUPS)]
    may_be_shared: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> Registration:
        if self.first_token >= self.num_tokens:
            raise ValueError(f"first_token {self.first_token} is not below num_tokens {self.num_tokens}")
        for blocks, block_size, pages in zip(
            self.tables, self.block_sizes, self.pages_per_block, strict=True
        ):
            if block_size % pages or len(blocks) != -(-self.num_tokens // block_size):
                raise ValueError(
                    f"{len(blocks)} blocks of {block_size} tokens and {pages} pages each do not match the "
                    "prompt"
                )
        if any(share.group >= len(self.tables) for share in self.shares):
            raise ValueError(f"a share names a group that is not among the {len(self.tables)}")
        if len({share.group for share in self.shares}) != len(self.shares):
            raise ValueError("two shares name one group")
        return self

    def table(self, group: int) -> GroupTable:
        """Returns the destination table of a cache group."""
        return GroupTable(self.tables[group], self.block_sizes[group], self.pages_per_block[group])

    def tag_of(self, group: int) -> bytes:
        """Returns the tag of a cache group's writes."""
        return tag_of(bytes.fromhex(self.tag), group)


def tag_of(tag: bytes, group: int) -> bytes:
    """Returns the tag of a cache group's writes, from a reader's tag."""
    return tag + bytes([group])
