"""What the scheduler half needs to know of an engine's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class EngineRequest(Protocol):
    """One request in its current state; each connector has an adapter of a few lines.

    Attributes
    ----------
    id
        The engine's name for the request.
    params
        The router's parameters, or None. Clients can send a value of any other type, so read them with
        `handover.params_of`. The scheduler half changes them: it marks what it has used, so that a request
        that is scheduled again is not handed over again.
    family
        A name that all samples of one request share, if this is one of several; else None.
    batch
        A name that all prompts of one request share, and the index of this prompt. It is the same at both
        engines if the router gives both the same name. None if it cannot be determined.
    was_refused
        Whether the engine refused the request before it told of it. It then ends at once, and its tokens and
        inputs stand in for those that the engine never passed on.
    has_tokens
        Whether its prompt is tokens. Embeddings have no digest.
    trace
        The W3C ``traceparent`` of its span, which its transfers carry; ``""`` if it is not traced.
    can_tell
        Whether the answer can carry parameters to the router.
    tokens
        The prompt's tokens, and those sampled after them.
    num_prompt_tokens, num_computed_tokens
        How many of the tokens are the prompt's, and how many have been computed or fetched.
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
    def was_refused(self) -> bool: ...

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
        """Returns the other inputs that determine the cache of its first tokens: media, an adapter."""
        ...

    def hold_back(self, num_tokens: int) -> bool:
        """Removes the last tokens from a prompt that has just arrived; returns whether it could."""
        ...
