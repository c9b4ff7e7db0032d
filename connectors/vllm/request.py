"""The engine's requests, as the scheduler half sees them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request, RequestStatus

# The engine's name for a sample: its number, and the request's name with eight random digits. If the user has
# turned the digits off, names prove nothing.
_SAMPLE: Final = re.compile(r"[0-9]+_(.*-[0-9a-f]{8})", re.DOTALL)
# The server's names for a chat and for the prompts of a completion, from the router's ``X-Request-Id``.
_CHAT: Final = re.compile(r"(chatcmpl-.*)-[0-9a-f]{8}", re.DOTALL)
_PROMPT: Final = re.compile(r"(cmpl-.*)-([0-9]{1,9})-[0-9a-f]{8}", re.DOTALL)

# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACE_PARENT: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@cache
def _streams_tell() -> bool:
    """Whether the server's streams carry a request's parameters: from vLLM 0.33 on."""
    from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

    return "kv_transfer_params" in CompletionStreamResponse.model_fields


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """Adapts vLLM's request; `kvxfer.connectors.common.engine_request.EngineRequest` has its members."""

    _own: Request

    @property
    def id(self) -> str:
        return self._own.request_id

    @property
    def params(self) -> dict[str, Any] | None:
        return self._own.kv_transfer_params

    @property
    def family(self) -> str | None:
        found = _SAMPLE.fullmatch(self._own.request_id)
        return None if found is None else found[1]

    @property
    def batch(self) -> tuple[str, int] | None:
        name = self.family or self._own.request_id
        if (found := _CHAT.fullmatch(name)) is not None:
            return found[1], 0
        if (found := _PROMPT.fullmatch(name)) is not None:
            return found[1], int(found[2])
        return None

    @property
    def was_refused(self) -> bool:
        return self._own.abort_immediately

    @property
    def has_tokens(self) -> bool:
        return self._own.prompt_token_ids is not None

    @property
    def trace(self) -> str:
        told = (self._own.trace_headers or {}).get("traceparent", "")
        return told if _TRACE_PARENT.fullmatch(told) else ""

    @property
    def can_tell(self) -> bool:
        sampling = self._own.sampling_params
        is_streamed = sampling is not None and sampling.output_kind is RequestOutputKind.DELTA
        return not is_streamed or _streams_tell()

    @property
    def tokens(self) -> Sequence[int]:
        return self._own.all_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self._own.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self._own.num_computed_tokens

    @property
    def is_whole(self) -> bool:
        """Whether the request finished normally: it was neither aborted nor refused."""
        return self._own.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)

    def beside_tokens(self, num_tokens: int) -> bytes:
        media = [each.identifier for each in self._own.mm_features if each.mm_position.offset < num_tokens]
        lora = self._own.lora_request
        return f"{media!r}{None if lora is None else lora.lora_name!r}".encode()

    def hold_back(self, num_tokens: int) -> bool:
        """Removes the last tokens from a request that has just arrived; returns whether it could.

        It cannot if no token would be left, if the client asks for log probabilities of the prompt (decode
        computes these prompts in any case), if the prompt is not tokens, or if it is continued later.
        """
        request = self._own
        if (
            not request.prompt_token_ids
            or request.num_prompt_tokens <= num_tokens
            or request.skip_reading_prefix_cache
            or request.resumable
        ):
            return False
        # A new list, because the front end shares the old one.
        request.prompt_token_ids = request.prompt_token_ids[:-num_tokens]
        request.num_prompt_tokens -= num_tokens
        del request._all_token_ids[-num_tokens:]
        # The last block's hash may include the removed tokens.
        del request.block_hashes[-1:]
        request.update_block_hashes()
        # A second sampled token would advance the state.
        request.max_tokens = 1
        return True
