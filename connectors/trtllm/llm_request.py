"""The engine's requests, as the scheduler half sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

# All that decides a cache beside the tokens, by release: an adapter, a salt, media.
_BESIDE: Final = (
    "lora_task_id",
    "cache_salt",
    "cache_salt_id",
    "multimodal_hashes",
    "multimodal_positions",
    "multimodal_lengths",
)
# What says that a request has a prompt of embeddings, or is none of a client's.
_EMBEDDINGS: Final = "prompt_embedding_table", "multimodal_embedding"
_FOREIGN: Final = "is_dummy_request", "is_generation_only_request"
_ENDED: Final = "is_generation_complete_state"

#: Of a request, what is read where a release has it.
OPTIONAL: Final = (*_BESIDE, *_EMBEDDINGS, *_FOREIGN, _ENDED)
#: What every release must have; the last is set as well (`recomputing`).
NEEDED: Final = "request_id", "prompt_len", "get_tokens", "context_current_position"


class ExecutorRequest:
    """One of them; `kvxfer.connectors.common.engine_request.EngineRequest` says what its members are.

    The engine passes no parameters along with a request: `params` are the connector's own.
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
    def has_tokens(self) -> bool:
        return all(getattr(self.own, name, None) is None for name in _EMBEDDINGS)

    @property
    def trace(self) -> str:
        return ""

    @property
    def can_tell(self) -> bool:
        return True  # by the register, and not by its answer

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
        """Whether it has come to an end and the cache holds all of its prompt.

        The engine moves a request on behind a forward that did not fail. Releases that preempt call what is
        to begin anew finished as well.
        """
        has_ended = getattr(self.own, _ENDED, True)
        return bool(has_ended) and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def is_served(self) -> bool:
        """Whether it is somebody's, of tokens, and has not been computed elsewhere by other means."""
        return self.has_tokens and not any(getattr(self.own, name, False) for name in _FOREIGN)

    def beside_tokens(self, num_tokens: int) -> bytes:
        return repr([getattr(self.own, name, None) for name in _BESIDE]).encode()

    def hold_back(self, num_tokens: int) -> bool:
        return False
