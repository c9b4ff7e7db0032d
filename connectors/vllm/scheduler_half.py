"""The half of the connector beside the engine's scheduler: decides, and touches no cache."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvxfer.connectors.vllm.cache_groups import CacheGroup
from kvxfer.connectors.vllm.handover import Handover, HandoverError, Rank, prompt_digest
from kvxfer.connectors.vllm.settings import Settings
from kvxfer.connectors.vllm.step import FetchOrder, Grant, RankMetadata, StepMetadata

_log = logging.getLogger("kvxfer")

Tables = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Prefill:
    """A request that is computed here and decoded elsewhere."""

    request: Request
    grant: Grant | None = None


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
    settings
        As the user set them.
    """

    def __init__(
        self,
        engine_id: str,
        produces: bool,
        consumes: bool,
        groups: tuple[CacheGroup, ...],
        settings: Settings,
    ) -> None:
        self._engine_id = engine_id
        self._produces = produces
        self._consumes = consumes
        self._groups = groups
        self._settings = settings
        self._ranks: tuple[Rank, ...] = ()
        self._pages_per_block: tuple[int, ...] = ()
        self._prefills: dict[str, _Prefill] = {}
        self._handovers: dict[str, Handover | str] = {}
        self._fetching: set[str] = set()
        self._next = StepMetadata()

    def set_ranks(self, ranks: dict[tuple[int, int], RankMetadata]) -> None:
        """Learns where the workers' agents are, by (pipeline, tensor) rank."""
        if not ranks:
            _log.warning(
                "kvxfer: the workers did not say where their agents are, so nothing is handed over: behind a "
                "MultiConnector, name KvxferConnector first"
            )
            return
        ordered = [rank for _, rank in sorted(ranks.items())]
        self._ranks = tuple(Rank(name=rank.name, address=rank.address) for rank in ordered)
        self._pages_per_block = ordered[0].pages_per_block

    # ---- decode -----------------------------------------------------------------------------

    def num_external_tokens(self, request: Request, num_computed: int) -> int:
        """Returns how many tokens of the prompt, behind those that are computed, a prefill engine has."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0
        missing: int = max(request.num_prompt_tokens - num_computed, 0)
        if not self._consumes:
            _log.warning(
                "kvxfer: request %s was prefilled elsewhere, but this engine's kv_role is kv_producer: "
                "it computes the prompt itself",
                request.request_id,
            )
            return 0
        handover = self._handover(request)
        if isinstance(handover, str):
            # Blocks are allocated and reported as not loaded: the engine's policy says what follows.
            return missing
        for group, table, block_size in zip(self._groups, handover.tables, handover.block_sizes, strict=True):
            if not group.can_load(table, block_size, handover.num_tokens):
                _log.info(
                    "kvxfer: request %s: prefill gave back a block that the last token looks at; the prompt "
                    "is computed here",
                    request.request_id,
                )
                return 0
        return missing

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external: int) -> None:
        """Orders the fetch of a request that got its blocks, or follows one that is computed here."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_prefill"):
            # Once for each request: a load that failed is computed here when the request comes again.
            params["do_remote_prefill"] = False
            handover = self._handover(request)
            self._handovers.pop(request.request_id, None)
            if num_external:
                self._fetching.add(request.request_id)
                num_tokens = request.num_prompt_tokens
                tables = self._tables(block_ids)
                self._next.fetches.append(
                    FetchOrder(request.request_id, handover, tables, num_tokens - num_external, num_tokens)
                )
            elif isinstance(handover, Handover):
                self._next.released.append(handover)
        elif params.get("do_remote_decode") and self._produces:
            self._prefills.setdefault(request.request_id, _Prefill(request))

    def received(self, request_ids: set[str]) -> None:
        """Forgets requests whose fetch has ended at every worker."""
        self._fetching -= request_ids

    def _handover(self, request: Request) -> Handover | str:
        """Returns the request's parameters, read once, or why they cannot be used."""
        known = self._handovers.get(request.request_id)
        if known is None:
            try:
                if request.prompt_token_ids is None:
                    raise HandoverError("prompts of embeddings are not handed over")
                known = Handover.read(
                    request.kv_transfer_params or {}, request, len(self._groups), self._settings
                )
            except HandoverError as error:
                known = str(error)
                _log.warning("kvxfer: request %s: %s", request.request_id, error)
            self._handovers[request.request_id] = known
        return known

    # ---- prefill ----------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """Returns what the workers have to do in this step."""
        for request_id in output.num_scheduled_tokens.keys() & self._prefills.keys():
            self._grant_if_complete(self._prefills[request_id], output)
        step, self._next = self._next, StepMetadata()
        return step

    def _grant_if_complete(self, prefill: _Prefill, output: SchedulerOutput) -> None:
        """Grants the prompt's blocks in the step that computes its last token.

        A lease of that step is in force when the engine's response tells it. The request may have
        been preempted since an earlier grant, and has other blocks then.
        """
        request = prefill.request
        request_id = request.request_id
        computed = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
        state = output.kv_connector_block_state
        if computed < request.num_prompt_tokens or state is None or request.prompt_token_ids is None:
            return
        block_ids = state.get_block_ids(request_id)
        if block_ids is None:
            return
        tables = tuple(
            table[: -(-request.num_prompt_tokens // group.block_size)]
            for group, table in zip(self._groups, self._tables(block_ids), strict=True)
        )
        if prefill.grant is not None:
            if _is_same_but_for_windows(prefill.grant.tables, tables):
                return
            self._next.withdrawn.append(request_id)
        # Nobody guesses them; the lowest bits differ, so that no two groups draw one number.
        leases = tuple(1 << 62 | secrets.randbits(54) << 8 | index for index in range(len(tables)))
        prefill.grant = Grant(request_id, leases, tables)
        self._next.grants.append(prefill.grant)

    # ---- the end ----------------------------------------------------------------------------

    def finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the request's blocks stay until a worker gives them back, and what to tell."""
        params = request.kv_transfer_params
        request_id = request.request_id
        if params and params.get("do_remote_prefill"):
            # It ended before it was scheduled: nobody will fetch, so the prefill need not wait.
            self.allocated(request, block_ids, 0)
        if request_id in self._fetching:
            self._next.abandoned.append(request_id)
        prefill = self._prefills.pop(request_id, None)
        if prefill is None or prefill.grant is None:
            return False, None
        grant = prefill.grant
        whole = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not whole or not self._ranks:
            self._next.withdrawn.append(request_id)
            return False, None
        # Blocks that left a sliding window since they were granted are not the request's any more.
        held = tuple(
            tuple(block if at < len(now) and now[at] == block else 0 for at, block in enumerate(granted))
            for granted, now in zip(grant.tables, self._tables(block_ids), strict=True)
        )
        handover = Handover(
            request_id,
            self._ranks,
            grant.leases,
            held,
            tuple(group.block_size for group in self._groups),
            self._pages_per_block,
            request.num_prompt_tokens,
        )
        return True, handover.params(self._engine_id, prompt_digest(request))

    def _tables(self, block_ids: tuple[list[int], ...]) -> Tables:
        return tuple(tuple(block_ids[group.index]) for group in self._groups)


def _is_same_but_for_windows(before: Tables, now: Tables) -> bool:
    """Whether only blocks that left a window are gone."""
    return all(
        len(old) == len(new) and all(block in (0, was) for was, block in zip(old, new, strict=True))
        for old, new in zip(before, now, strict=True)
    )
