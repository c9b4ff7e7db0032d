"""Requests that belong to no particular engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Request:
    """All that a connector reads of an engine's request (`kvxfer.connectors.common.engine_request`)."""

    tokens: list[int]
    id: str = "request"
    params: dict[str, Any] | None = None
    family: str | None = None
    batch: tuple[str, int] | None = None
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    was_refused: bool = False
    has_tokens: bool = True
    can_tell: bool = True
    trace: str = ""
    beside: bytes = b""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)

    def beside_tokens(self, num_tokens: int) -> bytes:
        return self.beside

    def hold_back(self, num_tokens: int) -> bool:
        del self.tokens[-num_tokens:]
        self.num_prompt_tokens -= num_tokens
        return True
