"""Requests that come to a decode engine and name no cache: it would compute their prompts itself.

A router that loses prefill's parameters on the way makes decode do all of the work, and nothing fails. So
such requests are counted and spoken of, and refused where the user says so.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.engine_request import EngineRequest
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.statistics import Recorder

_log = logging.getLogger("kvxfer")

_SAYS_EVERY_S: Final = 60.0


class Untransferred:
    """What the scheduler half knows of them, from their arrival to their end.

    Prompts of which no more than a block is missing, or than ``short_prompt_tokens``, are decode's own: short
    ones, and those that its prefix cache has.

    Parameters
    ----------
    groups
        Of the engine's cache.
    settings
        As the user set them.
    statistics
        Told of each request.
    clock
        Of seconds that never go back.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        settings: Settings,
        statistics: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # A block of states may be as long as any prompt.
        block_size = max((group.block_size for group in groups if not group.is_state), default=1)
        self._least = max(settings.short_prompt_tokens, block_size)
        self._refuses = settings.require_transfer
        self._statistics = statistics
        self._clock = clock
        self._unseen: set[str] = set()  # that have not been asked for yet
        self._refused: dict[str, str] = {}
        self._said_at = -math.inf
        self._num_unsaid = 0

    def arrived(self, request: EngineRequest) -> None:
        """Takes in a request that names no cache; one that is computed again later names none either."""
        self._unseen.add(request.id)

    def asked(self, request: EngineRequest, num_computed: int) -> None:
        """Takes in that a request is to be computed, of which so many tokens are."""
        if request.id not in self._unseen:
            return
        self._unseen.discard(request.id)
        missing = request.num_prompt_tokens - num_computed
        if missing <= self._least:
            return
        self._statistics.untransferred()
        if self._refuses:
            self._refused[request.id] = (
                f"it names no cache, and {missing} tokens of its prompt would have to be computed here "
                "(require_transfer): the router has to pass prefill's kv_transfer_params on"
            )
        else:
            self._say(request.id, missing)

    def refusal(self, request_id: str) -> str:
        """Returns why a request gets blocks only to fail; "" where it does not."""
        return self._refused.get(request_id, "")

    def ended(self, request_id: str) -> None:
        """Forgets a request."""
        self._unseen.discard(request_id)
        self._refused.pop(request_id, None)

    def _say(self, request_id: str, missing: int) -> None:
        now = self._clock()
        self._num_unsaid += 1
        if now - self._said_at < _SAYS_EVERY_S:
            return
        _log.warning(
            "kvxfer: request %s names no cache: this decode engine computes %d tokens of its prompt itself "
            "(such requests since it last said so: %d). Does the router pass prefill's kv_transfer_params "
            "on? require_transfer refuses them",
            request_id,
            missing,
            self._num_unsaid,
        )
        self._said_at, self._num_unsaid = now, 0
