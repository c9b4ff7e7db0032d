"""The connector class that TensorRT-LLM makes beside its scheduler, on rank 0."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import kvxfer
from kvxfer.connectors.common.handover import Handover, HandoverError, prompt_digest
from kvxfer.connectors.common.prompt_lookup import KEY_NBYTES, PromptLookup, PromptRegister
from kvxfer.connectors.common.scheduler_half import SchedulerHalf
from kvxfer.connectors.common.statistics import Counts
from kvxfer.connectors.common.step import Step
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.trtllm import interface
from kvxfer.connectors.trtllm.agreement import Said
from kvxfer.connectors.trtllm.executor_settings import ExecutorSettings, settings_of_environment
from kvxfer.connectors.trtllm.llm_request import ExecutorRequest
from kvxfer.connectors.trtllm.local_worker import find
from kvxfer.connectors.trtllm.pools import tables_of

_log = logging.getLogger("kvxfer")


class KvxferConnectorScheduler(interface.module.KvCacheConnectorScheduler):
    """Decides which prompts are handed over.

    The engine calls each method; `SchedulerHalf` documents what it does. The engine passes no parameters with
    a request, so decode asks prefill's register for each prompt and uses the answer as parameters.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._settings = settings_of_environment()
        self._ways: _Ways | None = None
        self._requests: dict[str, ExecutorRequest] = {}
        self._promised: dict[str, int] = {}  # tokens that were promised to the engine
        self._loading: set[str] = set()  # loads that have not ended on every rank
        self._blocks: dict[str, list[list[int]]] = {}  # the blocks of running requests
        self._reset: set[str] = set()
        self._granting: dict[str, dict[str, Any]] = {}  # parameters to register once all ranks have granted

    @property
    def _way(self) -> _Ways:
        # The engine registers its cache when both halves exist, and passes requests after that. It may
        # profile with one cache and serve with another, so compare each time.
        worker = find(self._llm_args)
        if self._ways is None or self._ways.registered is not worker.registered:
            self.shutdown()
            worker.listener = self
            self._ways = _Ways(worker.registered, self._settings)
        return self._ways

    # ---- a request begins -------------------------------------------------------------------

    def wait_for_initialization(self) -> None:
        """Begins to listen and to dial. If a release does not call this, the first request does it."""
        _ = self._way

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        seen = self._seen(request)
        if not seen.is_served:
            return 0, False
        half = self._way.half
        if seen.params is None:
            seen.params = self._way.params(seen)
            half.arrived(seen)
        count = half.num_external_tokens(seen, num_computed_tokens) or 0
        # The engine must compute at least one token.
        matched = min(count, seen.num_prompt_tokens - 1 - num_computed_tokens)
        self._promised[seen.id] = count if matched > 0 else 0
        return (matched, True) if matched > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        seen = self._seen(request)
        if seen.params is None:
            return
        num_external = self._promised.pop(seen.id, 0)
        self._way.half.allocated(seen, tables_of(block_ids_by_layer_group), num_external)
        if num_external:
            self._loading.add(seen.id)
        if seen.params.get("do_remote_decode") and self._way.register is not None:
            self._way.register.coming(seen.id, self._way.key(seen))

    def _seen(self, request: Any) -> ExecutorRequest:
        name = str(request.request_id)
        seen = self._requests.setdefault(name, ExecutorRequest(request))
        # Each call may pass a new object of the engine's for the same request.
        seen.own = request
        return seen

    # ---- a step -----------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        scheduled: dict[str, int] = {}
        if scheduler_output is None:  # an older release, in a step that computes nothing
            return self._step(scheduled)
        for data in scheduler_output.new_requests:
            self._blocks[str(data.request_id)] = [[*table] for table in _tables_in(data)]
            scheduled[str(data.request_id)] = data.num_scheduled_tokens
        for data in scheduler_output.cached_requests:
            name = str(data.request_id)
            tables = self._blocks.setdefault(name, [[] for _ in _tables_in(data)])
            for table, new in zip(tables, _tables_in(data), strict=True):
                table += new
            scheduled[name] = data.num_scheduled_tokens
        return self._step(scheduled)

    def idle_step(self) -> Step | None:
        """Returns the ranks' orders in a step that computes nothing; None if there are none."""
        step = self._step({})
        return None if step == Step() else step

    def _step(self, scheduled: dict[str, int]) -> Step:
        preempted, self._reset = self._reset, set()
        step = self._way.half.step(scheduled, preempted, self._blocks_of)
        # Do not stop fetches of aborted requests: the engine may keep their blocks for requests with the same
        # beginning.
        step.abandoned.clear()
        if self._way.lookup is not None:
            self._way.lookup.drain()
        return step

    def _blocks_of(self, request_id: str) -> list[list[int]] | None:
        blocks = self._blocks.get(request_id)
        return None if blocks is None else tables_of(blocks)

    def agreed(self, said: Said) -> None:
        """Processes an agreement of all ranks. The worker of rank 0 calls it, in the engine's loop."""
        half = self._way.half
        half.heard(said.news)
        half.received(set(said.received))
        half.given_back(said.sent)
        self._loading -= said.received
        if self._way.register is not None:
            # Every rank has begun the earlier steps before it agreed, so their grants are in force.
            for request_id, told in self._granting.items():
                self._way.register.ready(request_id, told)
            self._granting.clear()
            for request_id in said.sent:
                self._way.register.ended(request_id)

    # ---- a request ends ---------------------------------------------------------------------

    def request_reset(self, request: Any) -> None:
        """Notes that a request has lost its blocks and will start again."""
        name = str(request.request_id)
        if name in self._requests:
            self._blocks.pop(name, None)
            self._promised.pop(name, None)
            self._reset.add(name)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self.request_finished_by_layer_group(request, [cache_block_ids])

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        name = str(request.request_id)
        self._blocks.pop(name, None)
        self._promised.pop(name, None)
        seen = self._requests.pop(name, None)
        if seen is None or seen.params is None:
            return False
        seen.own = request
        tables = tables_of(cache_block_ids_by_layer_group)
        stays, told = self._way.half.finished(seen, tables, seen.is_whole)
        if (register := self._way.register) is not None:
            if stays and told is not None:
                self._granting[name] = told
            else:
                register.ended(name)
        # While a request loads, bytes still land in its blocks, so they must stay reserved.
        return stays or name in self._loading

    # ---- statistics, and the end ------------------------------------------------------------

    def take_statistics(self) -> Counts | None:
        """Returns the counts since the last call (`SchedulerHalf.take_statistics`)."""
        return self._way.half.take_statistics()

    def shutdown(self) -> None:
        """Stops listening and asking. The engine has no such call; agents end with their process."""
        ways, self._ways = self._ways, None
        if ways is not None:
            ways.close()


class _Ways:
    """The scheduler's state that exists once the ranks have registered their caches."""

    def __init__(self, registered: Any, settings: ExecutorSettings) -> None:
        if registered is None:
            raise RuntimeError("kvxfer: the engine asks for a request before it has registered its cache")
        self.registered = registered
        self._settings = settings
        self._engine_id: str = registered.engine_id
        # All parts of a layer group share one block table.
        groups = tuple(group for group in registered.pools.groups if not group.shape)
        self._num_tables = len(groups)
        self._declared = registered.pools.declared.encode()
        self.half = SchedulerHalf(
            self._engine_id,
            settings.produces,
            settings.consumes,
            groups,
            registered.pools.num_blocks,
            settings.shared,
        )
        self.half.set_ranks({(0, at): rank for at, rank in enumerate(registered.ranks)})
        self.register = PromptRegister(self._agent(listens=True)) if settings.produces else None
        self.lookup: PromptLookup | None = None
        if settings.consumes and settings.prefills:
            agent = self._agent(listens=False)
            self.lookup = PromptLookup(agent, settings.prefills, settings.lookup_timeout_s)
        if self.register is not None:
            _log.info(
                "kvxfer: engine %s answers enquiries for prompts at %s",
                self._engine_id,
                self.register.address,
            )

    def _agent(self, listens: bool) -> kvxfer.Agent:
        position = WorkerRank(self._engine_id)
        options = self._settings.shared.agent_options(position)
        if not listens:
            options = replace(options, listen="", advertise=None)
        return kvxfer.Agent(position.agent_name(), options)

    def key(self, seen: ExecutorRequest) -> bytes:
        """Returns the key of a prompt: equal for the same tokens in caches of the same form."""
        digest = hashlib.blake2b(self._declared, digest_size=KEY_NBYTES)
        digest.update(prompt_digest(seen, seen.num_prompt_tokens).encode())
        return digest.digest()

    def params(self, seen: ExecutorRequest) -> dict[str, Any]:
        """Returns the parameters that a router would have passed with a new request."""
        told = self._ask(seen) if self.lookup is not None and seen.num_prompt_tokens > 1 else None
        return told or {"do_remote_decode": self._settings.produces}

    def _ask(self, seen: ExecutorRequest) -> dict[str, Any] | None:
        assert self.lookup is not None
        told = self.lookup.ask(self.key(seen))
        if told is None:
            return None
        try:
            # Parameters that cannot be read promise nothing to the engine.
            Handover.read(told, seen, self._num_tables, self._settings.shared)
        except HandoverError as error:
            _log.warning("kvxfer: request %s is computed here: %s", seen.id, error)
            return None
        # The register hands over kept prompts only; anything else would promise what nobody brings.
        own = {name: value for name, value in told["kvxfer"].items() if name != "push"}
        return {**told, "kvxfer": own, "do_remote_prefill": True, "do_remote_decode": False}

    def close(self) -> None:
        """Stops listening and asking."""
        for each in (self.register, self.lookup):
            if each is not None:
                each.close()


def _tables_in(data: Any) -> Sequence[Sequence[int]]:
    """Returns a request's new blocks for each layer group; older releases have one group, as a flat list."""
    by_group: Sequence[Sequence[int]] = getattr(data, "new_block_ids_by_layer_group", ())
    return by_group or (data.new_block_ids,)
