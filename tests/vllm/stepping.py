"""A real scheduler of vLLM with the real connector, without a model: a test steps it by hand.

The test decides what the workers would do: which tokens are sampled, which transfers end in a step, and how.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.connectors.common.step import Chunk, FetchOrder, Grant, OwnRank, Remainder, Step
from kvxfer.connectors.vllm.metadata import RankMetadata, StepMetadata
from kvxfer.connectors.vllm.metrics import TransferStatistics
from kvxfer.directory import Entry

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 64
NUM_LAYERS: Final = 2
NUM_HEADS: Final = 2
HEAD_SIZE: Final = 8
_TOKEN: Final = 7

TO_PREFILL: Final = {"do_remote_decode": True, "do_remote_prefill": False}
KVXFER: Final = {"kv_connector": "KvxferConnector", "kv_connector_module_path": "kvxfer.connectors.vllm"}

init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK_SIZE, sha256)


def config(
    weights: Path,
    role: str,
    *,
    engine_id: str = "engine",
    policy: str = "fail",
    batch_tokens: int = 256,
    overlapping: bool = False,
    num_groups: int = 1,
    connector: dict[str, Any] | None = None,
    **extra: Any,
) -> VllmConfig:
    """Returns an engine's configuration.

    Parameters
    ----------
    weights
        Where the model is; only its configuration is read.
    policy
        What happens to requests whose cache cannot be loaded: ``"fail"`` or ``"recompute"``.
    batch_tokens
        Of one step: longer prompts are computed in chunks.
    overlapping
        Whether a step is scheduled before the last one's tokens are known (asynchronous scheduling).
    connector
        Another connector than KvxferConnector, with its ``kv_connector_extra_config``.
    extra
        Settings of KvxferConnector.
    """
    transfers: dict[str, Any] = {
        **(connector or {**KVXFER, "kv_connector_extra_config": extra}),
        "kv_role": role,
        "engine_id": engine_id,
        "kv_load_failure_policy": policy,
    }
    model = ModelConfig(model=str(weights), skip_tokenizer_init=True, dtype="float32", seed=1)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = NUM_BLOCKS
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=batch_tokens,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=overlapping,
            disable_hybrid_kv_cache_manager=num_groups == 1,
        ),
        kv_transfer_config=KVTransferConfig(**transfers),
    )


def caches(num_groups: int = 1, num_blocks: int = NUM_BLOCKS, window: int = 32) -> KVCacheConfig:
    """Returns the cache of a model whose layers see all tokens; a second group's layers see a window."""
    shape: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": NUM_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": torch.float32,
    }
    specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=window)]
    groups = [
        KVCacheGroupSpec([f"{at}.{layer}" for layer in range(NUM_LAYERS)], spec)
        for at, spec in enumerate(specs[:num_groups])
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


_request_ids = count(1)


def request(
    prompt: list[int], max_tokens: int = 4, params: dict[str, Any] | None = None, request_id: str = ""
) -> Request:
    """Returns a request as it arrives at a scheduler."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args=None if params is None else {"kv_transfer_params": dict(params)},
    )
    return Request(
        request_id=request_id or f"request-{next(_request_ids)}",
        prompt_token_ids=list(prompt),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=_hasher,
    )


@dataclass(slots=True)
class Answers:
    """What the workers report of transfers at the end of a step."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    told_by_workers: Any = None  # what build_connector_worker_meta gave


class Engine:
    """A scheduler, and a stand-in for its workers that records their orders.

    Attributes
    ----------
    scheduler
        vLLM's.
    kept
        Grants in force at the workers, by request.
    fetching
        Fetches that the workers have not reported.
    told
        What finished requests return to a router, by request.
    tokens
        Sampled of each request.
    finished
        Reasons of those that have ended, by request.
    counted
        What the connector beside the scheduler has counted.
    """

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, has_ranks: bool = True) -> None:
        config.cache_config.num_gpu_blocks = kv_cache.num_blocks
        overlapping = config.scheduler_config.async_scheduling
        self.scheduler: Scheduler = (AsyncScheduler if overlapping else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_cache,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        self._lag = 1 if overlapping else 0
        self._steps: deque[tuple[Any, list[tuple[str, bool]], Answers]] = deque()
        self.kept: dict[str, Grant | Chunk | Remainder] = {}
        self.fetching: dict[str, FetchOrder] = {}
        self.abandoned: set[str] = set()
        self.told: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        self.counted = TransferStatistics()
        self._ended: set[str] = set()  # requests that the workers know to have ended
        if has_ranks:
            num_groups = len(kv_cache.kv_cache_groups)
            agent = Entry("own.0", "tcp://127.0.0.1:7302", bytes(16))
            rank = RankMetadata(OwnRank(agent, (1,) * num_groups))
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): rank})

    @property
    def connector(self) -> Any:
        """The connector beside the scheduler."""
        return self.scheduler.connector

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def num_blocks_in_use(self) -> int:
        """Blocks in use; the null block is always in use."""
        return int(self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks())

    @property
    def can_be_sent(self) -> set[str]:
        """Requests whose blocks the workers may give back now."""
        return self.kept.keys() & self._ended

    def blocks_of(self, request_id: str) -> tuple[list[int], ...]:
        return tuple(self.scheduler.kv_cache_manager.get_block_ids(request_id))

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.scheduler.add_request(each)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self, answers: Answers | None = None) -> Any:
        """Schedules once and processes the workers' answers to the step that is due; returns their orders."""
        output = self.scheduler.schedule()
        meta: Any = output.kv_connector_metadata
        if isinstance(meta, StepMetadata):
            meta = meta.step
        sampled = []
        for each in output.num_scheduled_tokens:
            made = self.scheduler.requests[each]
            sampled.append((each, made.num_computed_tokens >= made.num_tokens))
        self._tell(meta, output.finished_req_ids)
        answers = answers or Answers()
        for each in answers.sent:
            del self.kept[each]
        for each in answers.received:
            del self.fetching[each]
            self.abandoned.discard(each)
        self._steps.append((output, sampled, answers))
        while len(self._steps) > (self._lag if output.num_scheduled_tokens else 0):
            self._take(*self._steps.popleft())
        return meta

    def _tell(self, meta: Any, ended: set[str]) -> None:
        if not isinstance(meta, Step):
            return
        for each in meta.withdrawn:
            self.kept.pop(each, None)
        for grant in meta.grants:
            assert grant.request_id not in self.kept, "granted twice, and not withdrawn between"
            for group, table in enumerate(grant.tables):
                held = self.blocks_of(grant.request_id)[group]
                assert not {block for block in table if block} - set(held), "granted what is not its own"
            self.kept[grant.request_id] = grant
        for each in meta.preempted:
            if isinstance(self.kept.get(each), Chunk | Remainder):
                del self.kept[each]
        pushes: list[Chunk | Remainder] = [*meta.chunks, *meta.remainders]
        for pushed in pushes:
            for table, held in zip(pushed.tables, self.blocks_of(pushed.request_id), strict=True):
                assert not {block for block in table if block} - set(held), "pushes what is not its own"
            self.kept[pushed.request_id] = pushed
        for order in meta.fetches:
            assert order.request_id not in self.fetching, "fetched twice"
            self.fetching[order.request_id] = order
        self.abandoned |= set(meta.abandoned) & self.fetching.keys()
        self._ended |= ended

    def _take(self, output: Any, sampled: list[tuple[str, bool]], answers: Answers) -> None:
        kv = KVConnectorOutput(
            finished_sending=answers.sent,
            finished_recving=answers.received,
            failed_recving=answers.failed,
            invalid_block_ids=answers.invalid_blocks,
            kv_connector_worker_meta=answers.told_by_workers,
        )
        made = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=[each for each, _ in sampled],
                req_id_to_index={each: at for at, (each, _) in enumerate(sampled)},
                sampled_token_ids=[[_TOKEN] if has_token else [] for _, has_token in sampled],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=kv,
            ),
        )
        for outputs in made.values():
            stats = outputs.scheduler_stats
            if stats is not None and (counts := stats.kv_connector_stats):
                self.counted.add(counts.get("KvxferConnector", counts))  # behind others by its name
            for each in outputs.outputs:
                self._note(each)

    def _note(self, output: EngineCoreOutput) -> None:
        self.tokens[output.request_id] = self.tokens.get(output.request_id, 0) + len(output.new_token_ids)
        if output.finish_reason is not None:
            self.finished[output.request_id] = str(output.finish_reason)
        if output.kv_transfer_params is not None:
            self.told[output.request_id] = output.kv_transfer_params

    def run(self, num_steps: int = 50) -> None:
        """Steps until nothing is left to schedule."""
        for _ in range(num_steps):
            self.step()
            if not self.scheduler.has_unfinished_requests() and not self._steps:
                return

    def settle(self) -> None:
        """Lets the workers report everything outstanding, and steps until the scheduler has nothing left."""
        for _ in range(200):
            if not self.scheduler.has_requests() and not self._steps:
                return
            self.step()  # what it tells may be answered in the next
            self.step(Answers(sent=set(self.can_be_sent), received=set(self.fetching)))
        raise AssertionError(f"the scheduler still has {list(self.scheduler.requests)}")


#: Makes an engine of a role, with changes to the usual one (`tests/vllm/conftest.py`).
Make = Callable[..., Engine]
