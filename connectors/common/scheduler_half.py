"""The scheduler half of a connector: decides which requests are handed over; touches no cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kvxfer
from kvxfer.connectors.common.cache_group import CacheGroup, num_held_back
from kvxfer.connectors.common.engine_request import EngineRequest
from kvxfer.connectors.common.expected_push import (
    ExpectedPush,
    answer,
    has_coordinates,
    is_further,
    is_push,
    read_key,
)
from kvxfer.connectors.common.handover import (
    Handover,
    HandoverError,
    is_return,
    params_of,
    prompt_digest,
    readers_of,
    unwanted,
)
from kvxfer.connectors.common.keeping import Keeping
from kvxfer.connectors.common.samples import Samples
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.statistics import Counts, Recorder
from kvxfer.connectors.common.step import (
    Chunk,
    Claimed,
    FetchOrder,
    Grant,
    News,
    OwnRank,
    Remainder,
    Step,
    Unfetchable,
)
from kvxfer.connectors.common.untransferred import Untransferred
from kvxfer.directory import Entry

_log = logging.getLogger("kvxfer")

Tables = tuple[tuple[int, ...], ...]
# A request's blocks as the engine has them: a list for each of its cache groups.
Blocks = Sequence[Sequence[int]]
BlocksOf = Callable[[str], Blocks | None]


@dataclass(slots=True)
class _Prefill:
    """A request that is computed here and decoded elsewhere."""

    request: EngineRequest
    key: bytes = b""  # the key of a push; a push grants no leases
    prompt: str = ""
    readers: tuple[str, ...] = ()  # the reader engines that the router names, if any
    grant: Grant | None = None
    tables: Tables = ()  # of a push: the tables that the workers were given last


class SchedulerHalf:
    """Tracks the requests that are handed over, at a prefill and at a decode engine.

    Parameters
    ----------
    engine_id
        This engine's id, for routers.
    produces, consumes
        Whether the engine's role lets it hand requests over, and take them over. The engine protects blocks
        in transfer according to its role.
    groups
        Cache groups that are transferred.
    num_blocks
        Of the engine's cache.
    settings
        The user's settings.
    shares_samples
        Whether other engines behind the same front end may get samples of one request.
    """

    def __init__(
        self,
        engine_id: str,
        produces: bool,
        consumes: bool,
        groups: tuple[CacheGroup, ...],
        num_blocks: int,
        settings: Settings,
        shares_samples: bool = False,
    ) -> None:
        self._engine_id = engine_id
        self._produces = produces
        self._consumes = consumes
        self._groups = groups
        self._settings = settings
        self._shares_samples = shares_samples
        self._num_held_back = num_held_back(groups)
        self._has_windows = any(group.window for group in groups)
        self._ranks: tuple[Entry, ...] = ()
        self._pages_per_block: tuple[int, ...] = ()
        self._prefills: dict[str, _Prefill] = {}
        self._sources: dict[str, Handover | ExpectedPush | Unfetchable] = {}
        # Requests that were logged: the scheduler asks again in every step while a request waits for blocks.
        self._said: set[str] = set()
        self._fetching: set[str] = set()
        self._kept: set[str] = set()  # decoded here; kept for a later turn when they have ended
        self._claimed: set[str] = set()  # computed elsewhere, claimed, not here yet
        self._keeping = Keeping(groups, num_blocks, settings)
        self._samples = Samples()
        self._statistics = Recorder()
        self._untransferred = Untransferred(groups, settings, self._statistics)
        # An engine of both roles may compute any request, unless its user sets `require_transfer`.
        self._misses_caches = consumes and (not produces or settings.require_transfer)
        self._next = Step()

    def set_ranks(self, ranks: dict[tuple[int, int], OwnRank]) -> None:
        """Stores the entries of the workers' agents, by (pipeline, tensor) rank."""
        ordered = [rank for _, rank in sorted(ranks.items())]
        self._ranks = tuple(rank.agent for rank in ordered)
        self._pages_per_block = ordered[0].pages_per_block

    def arrived(self, request: EngineRequest) -> None:
        """Registers a new request: shortens a prefill that must stop early, and claims a cache it names."""
        self._samples.arrived(request)
        if request.was_refused:
            return  # `finished` follows at once, and declines a cache that it names
        params = params_of(request)
        if request.params is not None and params is not request.params:
            _log.warning(
                "kvxfer: request %s: its kv_transfer_params are a %s, not an object, and are ignored",
                request.id,
                type(request.params).__name__,
            )
        is_prefill = params.get("do_remote_decode") and not params.get("do_remote_prefill")
        if self._num_held_back and self._produces and is_prefill:
            # A request that cannot be shortened is not handed over: both engines compute it whole.
            params["do_remote_decode"] = request.hold_back(self._num_held_back)
        names_a_cache = params.get("do_remote_prefill") or is_return(params)
        if self._misses_caches and not names_a_cache and not (is_prefill and self._produces):
            self._untransferred.arrived(request)
        if self._consumes and names_a_cache:
            # Claim it now, at the engine that keeps it: the request may wait here for its turn for long.
            source = self._source(request)
            if not isinstance(source, Unfetchable) and set(source.ranks).isdisjoint(self._ranks):
                self._claimed.add(request.id)
                self._next.claimed.append(Claimed(request.id, source))

    # ---- prompts computed elsewhere ---------------------------------------------------------

    def num_external_tokens(self, request: EngineRequest, num_computed: int) -> int | None:
        """Returns how many tokens of the prompt, after the computed ones, another engine has.

        None means "ask in a later step": another sample of the prompt is fetching them. If no `allocated`
        follows in the same step, the request is waiting for blocks.
        """
        count = self._num_external_tokens(request, num_computed)
        if count is not None:
            self._keeping.asked(request)
        return count

    def _num_external_tokens(self, request: EngineRequest, num_computed: int) -> int | None:
        params = params_of(request)
        comes_back = is_return(params)
        if not params.get("do_remote_prefill") and not comes_back:
            self._untransferred.asked(request, num_computed)
            refusal = self._untransferred.refusal(request.id)
            return max(self._num_loaded(request, refusal) - num_computed, 0) if refusal else 0
        if not self._consumes:
            if self._says_first(request.id):
                _log.warning(
                    "kvxfer: request %s was computed elsewhere, but this engine's kv_role is kv_producer: "
                    "it computes the prompt itself",
                    request.id,
                )
            return 0
        if (first := self._samples.first_of(request)) not in ("", request.id):
            # The tokens that the first sample fetched are in the prefix cache; this one computes the rest.
            return None if first in self._fetching else 0
        source = self._source(request)
        if not isinstance(source, Unfetchable) and not set(source.ranks).isdisjoint(self._ranks):
            # This engine computed it itself: the prefix cache has it.
            return 0
        if isinstance(source, Handover) and not self._can_load(request, source):
            if self._says_first(request.id):
                _log.info(
                    "kvxfer: request %s: the other engine no longer has the blocks that its next token "
                    "needs; the prompt is computed here",
                    request.id,
                )
            return 0
        if isinstance(source, Unfetchable) and comes_back:
            # The turn's tokens differ from those that decode generated: this engine computes it.
            return 0
        # If the source cannot be used for another reason, the engine allocates blocks and is told that their
        # load failed: its policy decides what follows.
        return max(self._num_loaded(request, source) - num_computed, 0)

    def _num_loaded(self, request: EngineRequest, source: Handover | ExpectedPush | Unfetchable) -> int:
        """Returns how many tokens of the prompt are here after a load."""
        num_tokens: int = request.num_prompt_tokens
        comes_back = isinstance(source, Handover) and source.comes_back
        # After a load of all tokens the engine allocates no blocks before the last window. It then computes
        # the last token again, which looks at one token more. So the load must end one token earlier.
        leaves_window = isinstance(source, ExpectedPush) and self._has_windows
        if comes_back or leaves_window or self._settings.waits or self._num_held_back:
            # The next forward must compute at least one token.
            num_tokens -= 1
        return min(source.num_tokens, num_tokens) if isinstance(source, Handover) else num_tokens

    def _can_load(self, request: EngineRequest, source: Handover) -> bool:
        num_loaded = self._num_loaded(request, source)
        if self._num_held_back and num_loaded != source.num_tokens:
            return False  # the source's states include later tokens
        next_token = min(num_loaded, request.num_prompt_tokens - 1)
        return all(
            group.can_load(table, block_size, source.num_tokens, next_token)
            for group, table, block_size in zip(self._groups, source.tables, source.block_sizes, strict=True)
        )

    def allocated(self, request: EngineRequest, block_ids: Blocks, num_external: int) -> None:
        """Orders the fetch of a request that got its blocks; begins to track one that will be handed over."""
        self._keeping.allocated(request)
        params = params_of(request)
        if num_external and (refusal := self._untransferred.refusal(request.id)):
            self._fetch(request, refusal, block_ids, num_external)
            return
        if not params:
            return
        request_id = request.id
        is_first = self._samples.begins(request)
        is_decode = bool(params.get("do_remote_prefill"))
        if is_decode or is_return(params):
            source = self._source(request)
            self._sources.pop(request_id, None)
            if not num_external or self._settings.waits:
                self._unclaim({request_id})
            if num_external:
                self._fetch(request, source, block_ids, num_external)
            elif is_first and not isinstance(source, Unfetchable):
                self._next.released.append(source)
            # Fetch once: if the load fails and the request comes again, this engine computes it.
            params["do_remote_prefill"] = False
            params.pop("remote_block_ids", None)
        wants_more = bool(params.get("do_remote_decode"))
        if is_decode and request.family is not None:
            # The engine cannot know which sample the conversation continues from.
            params["do_remote_decode"] = False
        elif is_decode:
            if (wants_more or self._settings.return_decoded) and self._produces and request.can_tell:
                self._kept.add(request_id)
        elif (
            wants_more
            and self._produces
            and is_first
            and request_id not in self._kept | self._prefills.keys()
        ):
            try:
                self._prefills[request_id] = self._prefill(request)
            except HandoverError as error:
                _log.warning("kvxfer: request %s is not handed over: %s", request_id, error)

    def _fetch(
        self,
        request: EngineRequest,
        source: Handover | ExpectedPush | Unfetchable,
        block_ids: Blocks,
        num_external: int,
    ) -> None:
        """Orders the fetch of a request's last tokens."""
        waits = self._settings.waits
        if not waits:
            self._fetching.add(request.id)
        stop = self._num_loaded(request, source)
        tables = self._tables(block_ids, stop)
        order = FetchOrder(request.id, source, tables, stop - num_external, stop, waits, trace=request.trace)
        self._next.fetches.append(order)

    def received(self, request_ids: set[str]) -> None:
        """Forgets requests whose fetch has ended at every worker."""
        self._fetching -= request_ids
        self._unclaim(request_ids)

    def _unclaim(self, request_ids: Collection[str]) -> None:
        ended = self._claimed.intersection(request_ids)
        self._claimed -= ended
        self._next.unclaimed += sorted(ended)

    def _source(self, request: EngineRequest) -> Handover | ExpectedPush | Unfetchable:
        """Returns the request's parsed parameters, or why they cannot be used. Parses once."""
        known = self._sources.get(request.id)
        if known is None:
            params = params_of(request)
            try:
                if not request.has_tokens:
                    raise HandoverError("prompts of embeddings are not handed over")
                known = self._read(params, request)
            except HandoverError as error:
                known = Unfetchable(str(error))
                _log.warning("kvxfer: request %s: %s", request.id, error)
            self._sources[request.id] = known
        return known

    def _read(self, params: dict[str, Any], request: EngineRequest) -> Handover | ExpectedPush:
        # At the prefill of a later turn, `arrived` has already removed the last tokens from the prompt.
        held_back = self._num_held_back if params.get("do_remote_prefill") else 0
        may_be_shared = self._may_be_shared(request)
        if not is_return(params):
            if is_push(params) or has_coordinates(params):
                expected = ExpectedPush.read(params, request, self._settings, held_back)
                return replace(expected, may_be_shared=may_be_shared)
            if is_further(request):
                first = unwanted(params, self._settings)
                return replace(ExpectedPush.beside(first, request, held_back), may_be_shared=may_be_shared)
        handover = Handover.read(params, request, len(self._groups), self._settings, held_back)
        return replace(handover, may_be_shared=may_be_shared)

    def _may_be_shared(self, request: EngineRequest) -> bool:
        return self._shares_samples and request.family is not None

    # ---- prefill ----------------------------------------------------------------------------

    def _prefill(self, request: EngineRequest) -> _Prefill:
        params = params_of(request)
        pushes = is_push(params) or is_further(request) or self._settings.mode == "push"
        if not pushes or is_return(params) or not request.has_tokens:
            if not request.can_tell:
                raise HandoverError(
                    "its answer is streamed, and this release of the engine puts no parameters in streamed "
                    "answers: ask prefill for an answer that is not streamed"
                )
            # The parameters of a return name the engine that had the request, not its next readers.
            return _Prefill(request, readers=() if is_return(params) else readers_of(params))
        try:
            key = read_key(params, request)
            if any(prefill.key == key for prefill in self._prefills.values()):
                raise HandoverError(
                    "another request has the same key: the router must draw a key for each request"
                )
            prompt = prompt_digest(request, request.num_prompt_tokens)
            return _Prefill(request, key, prompt, readers_of(params))
        except HandoverError as error:
            _log.warning("kvxfer: request %s is not pushed: %s", request.id, error)
            return _Prefill(request)

    def step(
        self,
        scheduled: Mapping[str, int],
        preempted: Collection[str],
        blocks_of: BlocksOf,
    ) -> Step:
        """Returns the orders for the workers in this step.

        Parameters
        ----------
        scheduled
            The requests that are computed in this step, and how many of their tokens.
        preempted
            Requests that have lost their blocks to other requests.
        blocks_of
            Returns the blocks that a scheduled request has in this step.
        """
        for request_id in self._prefills.keys() & preempted:
            prefill = self._prefills[request_id]
            prefill.tables = ()
            self._next.preempted.append(request_id)
            if prefill.grant is not None:
                prefill.grant = None
                self._next.withdrawn.append(request_id)
        for request_id in self._prefills.keys() & scheduled:
            prefill = self._prefills[request_id]
            if prefill.key:
                self._announce(prefill, scheduled[request_id], blocks_of)
            else:
                self._grant_if_complete(prefill, scheduled[request_id], blocks_of)
        self._next.given_way += self._keeping.give_way()
        step, self._next = self._next, Step()
        step.num_running = len(scheduled)
        return step

    def _announce(self, prefill: _Prefill, num_scheduled: int, blocks_of: BlocksOf) -> None:
        """Tells the workers which tokens of a pushed prompt this step computes."""
        request = prefill.request
        num_tokens = request.num_prompt_tokens
        first = min(request.num_computed_tokens, num_tokens)
        stop = min(first + num_scheduled, num_tokens)
        if first == num_tokens and prefill.tables:
            # The request runs past its prompt, and its window may leave blocks that readers still read.
            now = self._prompt_tables(blocks_of, request.id, num_tokens)
            if now is not None:
                self._shrink(prefill, now)
            return
        tables = self._prompt_tables(blocks_of, request.id, stop)
        if tables is not None:
            prefill.tables = tables
            self._next.chunks.append(
                Chunk(
                    *(request.id, prefill.key, prefill.prompt, tables, first, stop, num_tokens),
                    readers=prefill.readers,
                    trace=request.trace,
                )
            )

    def _shrink(self, prefill: _Prefill, now: Tables) -> None:
        """Tells the workers which blocks of a push have left a window since the last chunk."""
        held = _held(prefill.tables, now)
        if held != prefill.tables:
            prefill.tables = held
            self._next.remainders.append(Remainder(prefill.request.id, held))

    def _grant_if_complete(self, prefill: _Prefill, num_scheduled: int, blocks_of: BlocksOf) -> None:
        """Grants the prompt's blocks in the step that computes its last token.

        Workers grant the leases in this step, so they are in force before the engine's response carries them.
        If the request was preempted after an earlier grant, it has other blocks now and is granted again.
        """
        request = prefill.request
        request_id = request.id
        computed = request.num_computed_tokens + num_scheduled
        if computed < request.num_prompt_tokens or not request.has_tokens:
            return
        tables = self._prompt_tables(blocks_of, request_id, request.num_prompt_tokens)
        if tables is None:
            return
        if prefill.grant is not None:
            if _is_same_but_for_windows(prefill.grant.tables, tables):
                return
            self._next.withdrawn.append(request_id)
        prefill.grant = Grant(request_id, _draw_leases(len(tables)), tables, prefill.readers)
        self._next.grants.append(prefill.grant)

    def _prompt_tables(self, blocks_of: BlocksOf, request_id: str, num_tokens: int) -> Tables | None:
        """Returns the request's blocks of its first tokens, for each group."""
        blocks = blocks_of(request_id)
        return None if blocks is None else self._tables(blocks, num_tokens)

    def _says_first(self, request_id: str) -> bool:
        """Whether a request has not been logged yet; marks it as logged."""
        if request_id in self._said:
            return False
        self._said.add(request_id)
        return True

    # ---- requests kept for readers ----------------------------------------------------------

    def heard(self, news: News) -> None:
        """Processes the workers' news about requests that are kept here."""
        self._keeping.heard(news, len(self._ranks))

    def given_back(self, request_ids: Collection[str]) -> None:
        """Forgets requests whose blocks every worker has given back."""
        self._keeping.end(request_ids)

    def frees_blocks_soon(self) -> bool:
        """Whether kept blocks come back within moments, so that the engine need not preempt a request."""
        return self._keeping.frees_soon()

    # ---- statistics -------------------------------------------------------------------------

    def take_statistics(self) -> Counts | None:
        """Returns what was counted since the last call; None when nothing has happened.

        The kept requests are counted here, because all workers keep the same requests and each gives them
        back in its own time.
        """
        self._statistics.keeps(len(self._keeping))
        return self._statistics.take()

    # ---- the end ----------------------------------------------------------------------------

    def finished(
        self, request: EngineRequest, block_ids: Blocks, is_whole: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the blocks stay until the workers give them back, and the answer's parameters.

        With `is_whole` the request's last token was computed: the request was neither aborted nor refused.
        """
        params = params_of(request)
        self._sources.pop(request.id, None)
        self._untransferred.ended(request.id)
        self._said.discard(request.id)
        self._unclaim({request.id})
        names_a_cache = params and (params.get("do_remote_prefill") or is_return(params))
        if params and names_a_cache and self._samples.are_unbegun_without(request):
            self._decline(request, params)
        stays, told = self._finished(request, block_ids, is_whole)
        if stays:
            self._keeping.begin(request.id, block_ids, is_return=bool(told and is_return(told)))
        return stays, self._samples.ended(request, told)

    def _finished(
        self, request: EngineRequest, block_ids: Blocks, is_whole: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.id
        if request_id in self._fetching:
            self._next.abandoned.append(request_id)
        if request_id in self._kept:
            self._kept.discard(request_id)
            return self._hand_back(request, block_ids) if is_whole and self._ranks else (False, None)
        prefill = self._prefills.pop(request_id, None)
        if prefill is None or (prefill.grant is None and not prefill.tables):
            return False, None
        if not is_whole or not self._ranks:
            self._next.withdrawn.append(request_id)
            return False, None
        grant = prefill.grant
        now = self._tables(block_ids, request.num_prompt_tokens)
        if grant is None:
            self._shrink(prefill, now)
            return True, answer(self._engine_id, self._ranks)
        held = _held(grant.tables, now)
        handover = self._handover(request, grant.leases, held, request.num_prompt_tokens)
        return True, handover.params(self._engine_id, request)

    def _decline(self, request: EngineRequest, params: dict[str, Any]) -> None:
        """Tells the other engine that no fetch follows for a request that ended before it was scheduled."""
        try:
            may_be_shared = self._may_be_shared(request)
            if is_return(params) or not (is_push(params) or has_coordinates(params) or is_further(request)):
                self._next.released.append(
                    replace(unwanted(params, self._settings), may_be_shared=may_be_shared)
                )
            elif request.was_refused and (is_further(request) or not is_push(params)):
                raise HandoverError("its key follows from its prompt, which the engine did not pass on")
            else:
                self._next.released.append(self._read(params, request))
        except HandoverError as error:
            _log.debug("kvxfer: request %s is not given back: %s", request.id, error)
        params["do_remote_prefill"] = False
        params.pop("remote_block_ids", None)

    def _hand_back(self, request: EngineRequest, block_ids: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """Lets a later turn's prefill read the decoded request.

        The workers grant the leases only in the next step, when the response is on its way. A reader that
        comes earlier repeats its read (`Fetches`).
        """
        # The last token was sampled, but its cache was never computed.
        num_tokens = len(request.tokens) - 1
        if self._num_held_back:
            # An engine that runs a step ahead of its answers has computed it: its states include that token.
            num_tokens = request.num_computed_tokens
            if num_tokens > len(request.tokens):
                return False, None
        tables = self._tables(block_ids, num_tokens)
        leases = _draw_leases(len(tables))
        self._next.grants.append(Grant(request.id, leases, tables, is_return=True))
        handover = self._handover(request, leases, tables, num_tokens)
        handover = replace(handover, comes_back=True, keep_s=self._settings.return_ttl_s)
        return True, handover.params(self._engine_id, request)

    def _handover(
        self, request: EngineRequest, leases: tuple[kvxfer.LeaseToken, ...], tables: Tables, num_tokens: int
    ) -> Handover:
        return Handover(
            request.id,
            self._ranks,
            leases,
            tables,
            tuple(group.block_size for group in self._groups),
            self._pages_per_block,
            num_tokens,
            keep_s=self._settings.lease_ttl_s,
            batch=None if request.batch is None else request.batch[0],
        )

    def _tables(self, block_ids: Blocks, num_tokens: int) -> Tables:
        """Returns the block tables of a request's first tokens, for the groups that are transferred."""
        return tuple(group.blocks_of(block_ids[group.index], num_tokens) for group in self._groups)


def _draw_leases(count: int) -> tuple[kvxfer.LeaseToken, ...]:
    return tuple(kvxfer.LeaseToken.draw() for _ in range(count))


def _held(told: Tables, now: Tables) -> Tables:
    """Returns the announced blocks, with 0 for blocks that left a window since and may be reused."""
    return tuple(
        tuple(block if at < len(here) and here[at] == block else 0 for at, block in enumerate(table))
        for table, here in zip(told, now, strict=True)
    )


def _is_same_but_for_windows(before: Tables, now: Tables) -> bool:
    """Whether the tables differ only by blocks that left a window."""
    return all(
        len(old) == len(new) and all(block in (0, was) for was, block in zip(old, new, strict=True))
        for old, new in zip(before, now, strict=True)
    )
