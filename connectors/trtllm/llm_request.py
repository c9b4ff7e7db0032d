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
        embeddings = "prompt_embedding_table", "multimodal_embedding"
        return all(getattr(self.own, name, None) is None for name in embeddings)

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
        has_ended = getattr(self.own, "is_generation_complete_state", True)
        return bool(has_ended) and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def is_served(self) -> bool:
        """Whether it is somebody's, of tokens, and has not been computed elsewhere by other means."""
        foreign = "is_dummy_request", "is_generation_only_request"
        return self.has_tokens and not any(getattr(self.own, name, False) for name in foreign)

    def beside_tokens(self, num_tokens: int) -> bytes:
        return repr([getattr(self.own, name, None) for name in _BESIDE]).encode()

    def hold_back(self, num_tokens: int) -> bool:
        return False
