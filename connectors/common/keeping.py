"""Decides which kept requests give way when other requests need their blocks.

If a client gives up behind its router, no reader fetches the prompt that is kept here. So a request that no
engine has claimed is kept on trust only. When requests wait for blocks, or unclaimed requests hold more than
the user allows, the oldest unclaimed one gives way first. A claimed request stays until all known readers
have read it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from kvxfer.connectors.common.cache_group import CacheGroup
from kvxfer.connectors.common.engine_request import EngineRequest
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.step import News

_log = logging.getLogger("kvxfer")

# A read takes milliseconds. Other requests wait no longer than this for the blocks of a read.
_SOON_S: Final = 1.0


@dataclass(slots=True)
class _Kept:
    request_id: str
    num_blocks: int
    is_return: bool
    since_s: float
    is_claimed: bool = False
    num_read: int = 0  # workers that report that all known readers have read
    is_read: bool = False  # all workers report it
    returns_since_s: float = -math.inf
    gives_way: bool = False


class Keeping:
    """Tracks finished requests that are kept here for readers.

    Parameters
    ----------
    groups, num_blocks
        Of the engine's cache.
    settings
        The user's settings.
    clock
        A monotonic clock, in seconds.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = list({group.index: group for group in groups}.values())  # parts of one share blocks
        self._settings = settings
        self._clock = clock
        # How many blocks may be kept on trust: for prompts (False) and for returns (True).
        self._most = {
            False: int(settings.keep_share * num_blocks),
            True: int(settings.return_share * num_blocks),
        }
        self._kept: dict[str, _Kept] = {}  # the oldest first
        self._waiting: dict[str, int] = {}  # this step's requests without blocks, and how many they need
        self._is_short = False  # whether a running request lacks blocks in this step

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, request_id: str, block_ids: Sequence[Sequence[int]], *, is_return: bool) -> None:
        """Begins to track a finished request."""
        num_blocks = len(set().union(*block_ids) - {0})
        self._kept[request_id] = _Kept(request_id, num_blocks, is_return, self._clock())

    def end(self, request_ids: Collection[str]) -> None:
        """Forgets requests whose blocks the engine has back."""
        for request_id in self._kept.keys() & request_ids:
            del self._kept[request_id]

    def heard(self, news: News, num_workers: int = 1) -> None:
        """Updates the kept requests with the news of all workers."""
        for request_id in self._kept.keys() & news.claimed:
            self._kept[request_id].is_claimed = True
            self._kept[request_id].is_read = False
            if request_id not in news.read:
                self._kept[request_id].num_read = 0
        for request_id in news.read:
            if (kept := self._kept.get(request_id)) is not None:
                kept.num_read += 1
                kept.is_read = kept.num_read >= num_workers
        for request_id in self._kept.keys() & news.returning:
            self._kept[request_id].returns_since_s = self._clock()

    # ---- in a step --------------------------------------------------------------------------

    def asked(self, request: EngineRequest) -> None:
        """Notes a request that may get blocks in this step; it waits unless `allocated` follows."""
        self._waiting[request.id] = sum(each.num_blocks(request.num_prompt_tokens) for each in self._groups)

    def allocated(self, request: EngineRequest) -> None:
        """Notes that a request got its blocks."""
        self._waiting.pop(request.id, None)

    def frees_soon(self) -> bool:
        """Whether blocks come back within moments. The engine asks when a running request lacks blocks."""
        self._is_short = True
        now = self._clock()
        return any(
            kept.gives_way or now - kept.returns_since_s < _SOON_S or self._may_give_way(kept, now)
            for kept in self._kept.values()
        )

    def give_way(self) -> list[str]:
        """Returns the requests that give way in this step. Call it once, at the step's end."""
        needed = max(self._waiting.values(), default=int(self._is_short))
        self._waiting.clear()
        self._is_short = False
        now = self._clock()
        # The blocks of these come back in the next steps.
        needed -= sum(kept.num_blocks for kept in self._kept.values() if kept.gives_way)
        beyond = {is_return: self._num_on_trust(is_return) - most for is_return, most in self._most.items()}
        chosen: list[str] = []
        for kept in self._kept.values():
            if (needed > 0 or beyond[kept.is_return] > 0) and self._may_give_way(kept, now):
                kept.gives_way = True
                needed -= kept.num_blocks
                beyond[kept.is_return] -= kept.num_blocks
                chosen.append(kept.request_id)
                if kept.is_read:
                    continue
                _log.warning(
                    "kvxfer: request %s: no engine has asked for its cache for %.1f s, and other requests "
                    "need its %d blocks, which are given back (claim_within_s)",
                    kept.request_id,
                    now - kept.since_s,
                    kept.num_blocks,
                )
        return chosen

    def _may_give_way(self, kept: _Kept, now: float) -> bool:
        if kept.gives_way or kept.is_read:
            return not kept.gives_way
        return not kept.is_claimed and now - kept.since_s >= self._settings.claim_within_s

    def _num_on_trust(self, is_return: bool) -> int:
        return sum(
            kept.num_blocks
            for kept in self._kept.values()
            if kept.is_return == is_return and not (kept.is_claimed or kept.gives_way)
        )
