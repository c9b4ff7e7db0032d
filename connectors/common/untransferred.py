"""Detects requests at a decode engine that name no cache, so that decode would compute their prompts.

If a router drops prefill's parameters, decode does all of the work and no request fails. So such requests are
counted and logged, or refused if the user sets ``require_transfer``.
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
from kvxfer.connectors.common.step import Unfetchable

_log = logging.getLogger("kvxfer")

_SAYS_EVERY_S: Final = 60.0


class Untransferred:
    """Tracks requests that name no cache, from their arrival to their end.

    A prompt is exempt if it lacks at most a block, or at most ``short_prompt_tokens`` tokens: a short prompt,
    or one that decode's prefix cache has.

    Parameters
    ----------
    groups
        Of the engine's cache.
    settings
        The user's settings.
    statistics
        Counts each request.
    clock
        A monotonic clock, in seconds.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        settings: Settings,
        statistics: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Blocks of states do not count: one may be as long as any prompt.
        block_size = max((group.block_size for group in groups if not group.is_state), default=1)
        self._least = max(settings.short_prompt_tokens, block_size)
        self._refuses = settings.require_transfer
        self._statistics = statistics
        self._clock = clock
        self._unseen: set[str] = set()  # requests for which `asked` was not called yet
        self._refused: dict[str, Unfetchable] = {}
        self._said_at = -math.inf
        self._num_unsaid = 0

    def arrived(self, request: EngineRequest) -> None:
        """Adds a new request that names no cache.

        Only arrivals count: a request that is computed again after a fetch and a preemption names no cache
        either.
        """
        self._unseen.add(request.id)

    def asked(self, request: EngineRequest, num_computed: int) -> None:
        """Checks a request that is about to be computed; `num_computed` of its tokens are here already."""
        if request.id not in self._unseen:
            return
        self._unseen.discard(request.id)
        missing = request.num_prompt_tokens - num_computed
        if missing <= self._least:
            return
        self._statistics.untransferred()
        if self._refuses:
            self._refused[request.id] = Unfetchable(
                f"it names no cache, and {missing} tokens of its prompt would have to be computed here "
                "(require_transfer): the router has to pass prefill's kv_transfer_params on",
                "no-handover",
            )
        else:
            self._say(request.id, missing)

    def refusal(self, request_id: str) -> Unfetchable | None:
        """Returns why a request is refused, if it is. A refused request gets blocks and then fails."""
        return self._refused.get(request_id)

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
            "(such requests since the last warning: %d). Does the router pass prefill's kv_transfer_params "
            "on? With require_transfer, decode refuses such requests",
            request_id,
            missing,
            self._num_unsaid,
        )
        self._said_at, self._num_unsaid = now, 0
