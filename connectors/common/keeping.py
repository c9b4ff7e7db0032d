"""Which of the requests that are kept for readers give way, where others need their blocks.

A client that gives up behind its router leaves a prompt here that nobody comes for. As long as no
engine has said that it knows the request, it is kept on trust: where requests wait for blocks, or more is
kept so than the user lets, the oldest goes first. One that a reader's engine knows of stays, until all that
are known have read it.
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

# A read takes milliseconds; one that takes longer is waited for by no other request.
_SOON_S: Final = 1.0


@dataclass(slots=True)
class _Kept:
    request_id: str
    num_blocks: int
    is_return: bool
    since_s: float
    is_claimed: bool = False
    num_read: int = 0  # workers that say that all have read who are known to come
    is_read: bool = False  # so say all
    returns_since_s: float = -math.inf
    gives_way: bool = False


class Keeping:
    """What the scheduler half knows of requests that have finished and are kept here.

    Parameters
    ----------
    groups, num_blocks
        Of the engine's cache.
    settings
        As the user set them.
    clock
        Of seconds that never go back.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = list({group.index: group for group in groups}.values())  # parts of one have its blocks
        self._settings = settings
        self._clock = clock
        # By whether they are returns: how many blocks may be kept on trust.
        self._most = {
            False: int(settings.keep_share * num_blocks),
            True: int(settings.return_share * num_blocks),
        }
        self._kept: dict[str, _Kept] = {}  # the oldest first
        self._waiting: dict[str, int] = {}  # in this step: how many blocks a request that has none needs
        self._is_short = False  # in this step, for one that has some

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, request_id: str, block_ids: Sequence[Sequence[int]], *, is_return: bool) -> None:
        """Keeps a request that has finished."""
        num_blocks = len(set().union(*block_ids) - {0})
        self._kept[request_id] = _Kept(request_id, num_blocks, is_return, self._clock())

    def end(self, request_ids: Collection[str]) -> None:
        """Forgets requests whose blocks are the engine's again."""
        for request_id in self._kept.keys() & request_ids:
            del self._kept[request_id]

    def heard(self, news: News, num_workers: int = 1) -> None:
        """Takes in what the workers, of which there are so many, have heard of them."""
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
        """Takes in that a request may get blocks in this step: if it is not `allocated` any, it waits."""
        self._waiting[request.id] = sum(each.num_blocks(request.num_prompt_tokens) for each in self._groups)

    def allocated(self, request: EngineRequest) -> None:
        """Takes in that a request got its blocks."""
        self._waiting.pop(request.id, None)

    def frees_soon(self) -> bool:
        """Whether blocks come back within moments; a request that is computed lacks some, if it is asked."""
        self._is_short = True
        now = self._clock()
        return any(
            kept.gives_way or now - kept.returns_since_s < _SOON_S or self._may_give_way(kept, now)
            for kept in self._kept.values()
        )

    def give_way(self) -> list[str]:
        """Returns who gives way in this step, which ends with it."""
        needed = max(self._waiting.values(), default=int(self._is_short))
        self._waiting.clear()
        self._is_short = False
        now = self._clock()
        # Those come back in the next steps.
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
                    "kvxfer: request %s: no engine has asked for its cache for %.1f s, and others need its "
                    "%d blocks: they are given back (claim_within_s)",
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
