"""The half of the connector beside the engine's scheduler: decides, and touches no cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kvxfer
from kvxfer.connectors.common.appointment import (
    Appointment,
    answer,
    has_coordinates,
    is_further,
    is_push,
    read_key,
)
from kvxfer.connectors.common.cache_group import CacheGroup, num_held_back
from kvxfer.connectors.common.engine_request import EngineRequest
from kvxfer.connectors.common.handover import (
    Handover,
    HandoverError,
    is_return,
    prompt_digest,
    readers_of,
    unwanted,
)
from kvxfer.connectors.common.keeping import Keeping
from kvxfer.connectors.common.samples import Samples
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.statistics import Counts, Recorder
from kvxfer.connectors.common.step import Chunk, Claimed, FetchOrder, Grant, News, OwnRank, Remainder, Step
from kvxfer.connectors.common.untransferred import Untransferred
from kvxfer.directory import Entry

_log = logging.getLogger("kvxfer")

Tables = tuple[tuple[int, ...], ...]
# As an engine has them: for each of its cache groups a request's blocks.
Blocks = Sequence[Sequence[int]]
BlocksOf = Callable[[str], Blocks | None]


@dataclass(slots=True)
class _Prefill:
    """A request that is computed here and decoded elsewhere."""

    request: EngineRequest
    key: bytes = b""  # of a push; nothing is granted then
    prompt: str = ""
    readers: tuple[str, ...] = ()  # engines that will have it, where the router names them
    grant: Grant | None = None
    tables: Tables = ()  # of a push, as the workers were told last


class SchedulerHalf:
    """Follows requests that are handed over, as prefill and as decode engine.

    Parameters
    ----------
    engine_id
        This engine's, for routers.
    produces, consumes
        What its role lets it do: the engine guards blocks in flight by it.
    groups
        Cache groups that are transferred.
    num_blocks
        Of the engine's cache.
    settings
        As the user set them.
    shares_samples
        Whether samples of one request may be at other engines, whose front end this one has.
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
        self._sources: dict[str, Handover | Appointment | str] = {}
        # Requests of which something was said: the scheduler asks in every step in which they wait for room.
        self._said: set[str] = set()
        self._fetching: set[str] = set()
        self._kept: set[str] = set()  # decoded here, and to be fetched when they have ended
        self._claimed: set[str] = set()  # computed elsewhere, and not here yet
        self._keeping = Keeping(groups, num_blocks, settings)
        self._samples = Samples()
        self._statistics = Recorder()
        self._untransferred = Untransferred(groups, settings, self._statistics)
        # An engine of both roles computes whatever it is asked for, unless its user wants none of that.
        self._misses_caches = consumes and (not produces or settings.require_transfer)
        self._next = Step()

    def set_ranks(self, ranks: dict[tuple[int, int], OwnRank]) -> None:
        """Learns where the workers' agents are, by (pipeline, tensor) rank."""
        ordered = [rank for _, rank in sorted(ranks.items())]
        self._ranks = tuple(rank.agent for rank in ordered)
        self._pages_per_block = ordered[0].pages_per_block

    def arrived(self, request: EngineRequest) -> None:
        """Has prefill end where decode begins, if that is before the prompt's end."""
        self._samples.arrived(request)
        params = request.params or {}
        is_prefill = params.get("do_remote_decode") and not params.get("do_remote_prefill")
        if self._num_held_back and self._produces and is_prefill:
            # What cannot be shortened is computed whole, here and at decode.
            params["do_remote_decode"] = request.hold_back(self._num_held_back)
        names_a_cache = params.get("do_remote_prefill") or is_return(params)
        if self._misses_caches and not names_a_cache and not (is_prefill and self._produces):
            self._untransferred.arrived(request)
        if self._consumes and names_a_cache:
            # Whoever keeps it learns now that it is wanted: it may wait here for its turn for long.
            source = self._source(request)
            if not isinstance(source, str) and set(source.ranks).isdisjoint(self._ranks):
                self._claimed.add(request.id)
                self._next.claimed.append(Claimed(request.id, source))

    # ---- what was computed elsewhere --------------------------------------------------------

    def num_external_tokens(self, request: EngineRequest, num_computed: int) -> int | None:
        """Returns how many tokens of the prompt, behind those that are computed, another engine has.

        None is for another step to say: another sample of the prompt is fetching them. A request that
        is asked for, and `allocated` nothing in the same step, waits for blocks.
        """
        count = self._num_external_tokens(request, num_computed)
        if count is not None:
            self._keeping.asked(request)
        return count

    def _num_external_tokens(self, request: EngineRequest, num_computed: int) -> int | None:
        params = request.params or {}
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
            # What it has brought is in the prefix cache; the rest is computed.
            return None if first in self._fetching else 0
        source = self._source(request)
        if not isinstance(source, str) and not set(source.ranks).isdisjoint(self._ranks):
            # It was computed here: the prefix cache has it.
            return 0
        if isinstance(source, Handover) and not self._can_load(request, source):
            if self._says_first(request.id):
                _log.info(
                    "kvxfer: request %s: what its next token looks at was given back; the prompt is "
                    "computed here",
                    request.id,
                )
            return 0
        if isinstance(source, str) and comes_back:
            # It goes on in another way than decode did: it is computed.
            return 0
        # Where it cannot be used otherwise, blocks are allocated and reported as not loaded: the engine's
        # policy says what follows.
        return max(self._num_loaded(request, source) - num_computed, 0)

    def _num_loaded(self, request: EngineRequest, source: Handover | Appointment | str) -> int:
        """Returns how many tokens are there after a load."""
        num_tokens: int = request.num_prompt_tokens
        comes_back = isinstance(source, Handover) and source.comes_back
        # The engine takes no block for what a window has left behind all that is loaded, and computes the
        # last token again: that one looks at a token more.
        leaves_window = isinstance(source, Appointment) and self._has_windows
        if comes_back or leaves_window or self._settings.waits or self._num_held_back:
            # The forward that follows is to compute at least one.
            num_tokens -= 1
        return min(source.num_tokens, num_tokens) if isinstance(source, Handover) else num_tokens

    def _can_load(self, request: EngineRequest, source: Handover) -> bool:
        num_loaded = self._num_loaded(request, source)
        if self._num_held_back and num_loaded != source.num_tokens:
            return False  # its states are of tokens beyond
        next_token = min(num_loaded, request.num_prompt_tokens - 1)
        return all(
            group.can_load(table, block_size, source.num_tokens, next_token)
            for group, table, block_size in zip(self._groups, source.tables, source.block_sizes, strict=True)
        )

    def allocated(self, request: EngineRequest, block_ids: Blocks, num_external: int) -> None:
        """Orders the fetch of a request that got its blocks, and follows one that is to be handed over."""
        self._keeping.allocated(request)
        params = request.params
        if num_external and (refusal := self._untransferred.refusal(request.id)):
            self._fetch(request, refusal, block_ids, num_external, "no-handover")
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
            elif is_first and not isinstance(source, str):
                self._next.released.append(source)
            # Once for each request: a load that failed is computed here when the request comes again.
            params["do_remote_prefill"] = False
            params.pop("remote_block_ids", None)
        wants_more = bool(params.get("do_remote_decode"))
        if is_decode and request.family is not None:
            # Nobody says with which of them a conversation goes on.
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
        source: Handover | Appointment | str,
        block_ids: Blocks,
        num_external: int,
        code: str = "bad-handover",
    ) -> None:
        """Orders the fetch of a request's last tokens; of one that cannot be fetched, that it fails."""
        waits = self._settings.waits
        if not waits:
            self._fetching.add(request.id)
        stop = self._num_loaded(request, source)
        tables = self._tables(block_ids, stop)
        order = FetchOrder(
            request.id, source, tables, stop - num_external, stop, waits, code, trace=request.trace
        )
        self._next.fetches.append(order)

    def received(self, request_ids: set[str]) -> None:
        """Forgets requests whose fetch has ended at every worker."""
        self._fetching -= request_ids
        self._unclaim(request_ids)

    def _unclaim(self, request_ids: Collection[str]) -> None:
        ended = self._claimed.intersection(request_ids)
        self._claimed -= ended
        self._next.unclaimed += sorted(ended)

    def _source(self, request: EngineRequest) -> Handover | Appointment | str:
        """Returns the request's parameters, read once, or why they cannot be used."""
        known = self._sources.get(request.id)
        if known is None:
            params = request.params or {}
            try:
                if not request.has_tokens:
                    raise HandoverError("prompts of embeddings are not handed over")
                known = self._read(params, request)
            except HandoverError as error:
                known = str(error)
                _log.warning("kvxfer: request %s: %s", request.id, error)
            self._sources[request.id] = known
        return known

    def _read(self, params: dict[str, Any], request: EngineRequest) -> Handover | Appointment:
        # A turn's prefill has them taken from it already.
        held_back = self._num_held_back if params.get("do_remote_prefill") else 0
        may_be_shared = self._may_be_shared(request)
        if not is_return(params):
            if is_push(params) or has_coordinates(params):
                appointment = Appointment.read(params, request, self._settings, held_back)
                return replace(appointment, may_be_shared=may_be_shared)
            if is_further(request):
                first = unwanted(params, self._settings)
                return replace(Appointment.beside(first, request, held_back), may_be_shared=may_be_shared)
        handover = Handover.read(params, request, len(self._groups), self._settings, held_back)
        return replace(handover, may_be_shared=may_be_shared)

    def _may_be_shared(self, request: EngineRequest) -> bool:
        return self._shares_samples and request.family is not None

    # ---- prefill ----------------------------------------------------------------------------

    def _prefill(self, request: EngineRequest) -> _Prefill:
        params = request.params or {}
        pushes = is_push(params) or is_further(request) or self._settings.mode == "push"
        if not pushes or is_return(params) or not request.has_tokens:
            if not request.can_tell:
                raise HandoverError(
                    "its answer is a stream, which carries no parameters in this release of the engine: ask "
                    "prefill for one that is not streamed"
                )
            # What brings a request back says who had it, and nothing of who will.
            return _Prefill(request, readers=() if is_return(params) else readers_of(params))
        try:
            key = read_key(params, request)
            if any(prefill.key == key for prefill in self._prefills.values()):
                raise HandoverError("its key is another request's: a router draws one for each")
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
        """Returns what the workers have to do in this step.

        Parameters
        ----------
        scheduled
            Requests that are computed in it, and how many of their tokens.
        preempted
            Requests that have lost their blocks to others.
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
            # It goes on past its prompt, and a window leaves blocks that may still be read.
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
        """Tells the workers which blocks of a push have left a window since they were told of them."""
        held = _held(prefill.tables, now)
        if held != prefill.tables:
            prefill.tables = held
            self._next.remainders.append(Remainder(prefill.request.id, held))

    def _grant_if_complete(self, prefill: _Prefill, num_scheduled: int, blocks_of: BlocksOf) -> None:
        """Grants the prompt's blocks in the step that computes its last token.

        A lease of that step is in force when the engine's response tells it. The request may have
        been preempted since an earlier grant, and has other blocks then.
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
        """Returns the request's blocks of so many tokens, for each group."""
        blocks = blocks_of(request_id)
        return None if blocks is None else self._tables(blocks, num_tokens)

    def _says_first(self, request_id: str) -> bool:
        """Whether nothing was said of a request yet."""
        if request_id in self._said:
            return False
        self._said.add(request_id)
        return True

    # ---- what is kept for readers -----------------------------------------------------------

    def heard(self, news: News) -> None:
        """Takes in what the workers have heard of requests that are kept here."""
        self._keeping.heard(news, len(self._ranks))

    def given_back(self, request_ids: Collection[str]) -> None:
        """Forgets requests whose blocks every worker has given back."""
        self._keeping.end(request_ids)

    def frees_blocks_soon(self) -> bool:
        """Whether blocks that are kept come back within moments, so that none need be taken from others."""
        return self._keeping.frees_soon()

    # ---- what is counted --------------------------------------------------------------------

    def take_statistics(self) -> Counts | None:
        """Returns what was counted since the last call; None when nothing has happened.

        What is kept for readers is counted here: each worker has the same requests, and gives them back
        in its own time.
        """
        self._statistics.keeps(len(self._keeping))
        return self._statistics.take()

    # ---- the end ----------------------------------------------------------------------------

    def finished(
        self, request: EngineRequest, block_ids: Blocks, is_whole: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the request's blocks stay until a worker gives them back, and what to tell.

        Of one that is whole the last token was computed: it was neither aborted nor refused.
        """
        params = request.params
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
        """Tells the other engine of a request that ended before it was scheduled that nobody will fetch.

        The engine calls with a stand-in, of one token, for what it refused before it got here.
        """
        try:
            may_be_shared = self._may_be_shared(request)
            if is_return(params) or not (is_push(params) or has_coordinates(params) or is_further(request)):
                self._next.released.append(
                    replace(unwanted(params, self._settings), may_be_shared=may_be_shared)
                )
            else:
                self._next.released.append(self._read(params, request))
        except HandoverError as error:
            _log.debug("kvxfer: request %s is not given back: %s", request.id, error)
        params["do_remote_prefill"] = False
        params.pop("remote_block_ids", None)

    def _hand_back(self, request: EngineRequest, block_ids: Blocks) -> tuple[bool, dict[str, Any] | None]:
        """Lets a later turn's prefill read what was decoded.

        The response is on its way before the workers hear of the leases, in the next step: whoever is
        faster asks again (`Fetches`).
        """
        # What follows from the last token was never computed.
        num_tokens = len(request.tokens) - 1
        if self._num_held_back:
            # Or it was, where the engine is a step ahead of its answers: its states are of that token too.
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
        """Returns the tables of the groups that are transferred, of the first tokens."""
        return tuple(group.blocks_of(block_ids[group.index], num_tokens) for group in self._groups)


def _draw_leases(count: int) -> tuple[kvxfer.LeaseToken, ...]:
    return tuple(kvxfer.LeaseToken.draw() for _ in range(count))


def _held(told: Tables, now: Tables) -> Tables:
    """Returns blocks that were told, 0 for those that left a window since: they may be others' now."""
    return tuple(
        tuple(block if at < len(here) and here[at] == block else 0 for at, block in enumerate(table))
        for table, here in zip(told, now, strict=True)
    )


def _is_same_but_for_windows(before: Tables, now: Tables) -> bool:
    """Whether only blocks that left a window are gone."""
    return all(
        len(old) == len(new) and all(block in (0, was) for was, block in zip(old, new, strict=True))
        for old, new in zip(before, now, strict=True)
    )
