"""The engine's requests, as the scheduler half sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

# The inputs beside the tokens that determine a cache, in all releases: an adapter, a salt, media.
_BESIDE: Final = (
    "lora_task_id",
    "cache_salt",
    "cache_salt_id",
    "multimodal_hashes",
    "multimodal_positions",
    "multimodal_lengths",
)
# Fields that mark a request with a prompt of embeddings, or a request that is not from a client.
_EMBEDDINGS: Final = "prompt_embedding_table", "multimodal_embedding"
_FOREIGN: Final = "is_dummy_request", "is_generation_only_request"
_ENDED: Final = "is_generation_complete_state"

#: Fields of a request that are read if a release has them.
OPTIONAL: Final = (*_BESIDE, *_EMBEDDINGS, *_FOREIGN, _ENDED)
#: Fields that every release must have; the last one is also set (`recomputing`).
NEEDED: Final = "request_id", "prompt_len", "get_tokens", "context_current_position"


class ExecutorRequest:
    """Adapts the engine's request; `kvxfer.connectors.common.engine_request.EngineRequest` has its members.

    The engine passes no parameters with a request: the connector makes `params` itself.
    """

    __slots__ = ("own", "params")

    def __init__(self, own: Any, params: dict[str, Any] | None = None) -> None:
        self.own = own
        self.params = params

    @property
    def id(self) -> str:
        return str(self.own.request_id)

    @property
    def family(self) -> str | None:
        return None

    @property
    def batch(self) -> tuple[str, int] | None:
        return None

    @property
    def was_refused(self) -> bool:
        return False

    @property
    def has_tokens(self) -> bool:
        return all(getattr(self.own, name, None) is None for name in _EMBEDDINGS)

    @property
    def trace(self) -> str:
        return ""

    @property
    def can_tell(self) -> bool:
        return True  # through the register, not through its answer

    @property
    def tokens(self) -> Sequence[int]:
        tokens: Sequence[int] = self.own.get_tokens(0)
        return tokens

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.own.prompt_len)

    @property
    def num_computed_tokens(self) -> int:
        return int(self.own.context_current_position)

    @property
    def is_whole(self) -> bool:
        """Whether it has ended and the cache holds all of its prompt.

        The engine advances a request only after a forward that did not fail. Releases that preempt also
        report a request as finished when it will start again.
        """
        has_ended = getattr(self.own, _ENDED, True)
        return bool(has_ended) and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def is_served(self) -> bool:
        """Whether it is a client's request, with tokens, and was not computed elsewhere by other means."""
        return self.has_tokens and not any(getattr(self.own, name, False) for name in _FOREIGN)

    def beside_tokens(self, num_tokens: int) -> bytes:
        return repr([getattr(self.own, name, None) for name in _BESIDE]).encode()

    def hold_back(self, num_tokens: int) -> bool:
        return False
