"""What the scheduler half has to know of an engine's request, whatever the engine calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class EngineRequest(Protocol):
    """One request, as it stands in its engine now; each connector has an adapter of a few lines.

    Attributes
    ----------
    id
        What the engine calls it.
    params
        What came with it by way of the router, to be changed: what was used is crossed out, so that a
        request that comes again is not handed over again. None where nothing came.
    family
        What all samples of one request have in common, where this is one of several; else None.
    batch
        What the prompts of one request have in common, and which of them this is. Both engines call it so
        where the router gives both one name; None where that cannot be told.
    has_tokens
        Whether its prompt is tokens, and no embeddings: those have no digest.
    trace
        The W3C ``traceparent`` of its span, which its transfers are told with; ``""`` where it is not traced.
    can_tell
        Whether who asked for it learns what is told with its answer.
    tokens
        The prompt's, and those that were sampled behind it.
    num_prompt_tokens, num_computed_tokens
        How many of the tokens are the prompt's, and how many have been computed or brought.
    """

    @property
    def id(self) -> str: ...

    @property
    def params(self) -> dict[str, Any] | None: ...

    @property
    def family(self) -> str | None: ...

    @property
    def batch(self) -> tuple[str, int] | None: ...

    @property
    def has_tokens(self) -> bool: ...

    @property
    def trace(self) -> str: ...

    @property
    def can_tell(self) -> bool: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    def beside_tokens(self, num_tokens: int) -> bytes:
        """Returns all that decides the cache of its first tokens beside them: media, an adapter."""
        ...

    def hold_back(self, num_tokens: int) -> bool:
        """Takes the last tokens from a prompt that has just arrived; returns whether that can be done."""
        ...
