"""The connector class: vLLM makes an instance beside its scheduler, and one beside each worker."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvxfer.connectors.common.compute_stream import TorchStream
from kvxfer.connectors.common.scheduler_half import SchedulerHalf
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.step import News, Step
from kvxfer.connectors.common.worker_half import WorkerHalf
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.vllm.cache_groups import groups_of
from kvxfer.connectors.vllm.cache_tensors import ModelCache, memory_of
from kvxfer.connectors.vllm.metadata import RankMetadata, StepMetadata, WorkerMetadata
from kvxfer.connectors.vllm.metrics import Metrics, TransferStatistics
from kvxfer.connectors.vllm.request import VllmRequest

if TYPE_CHECKING:
    import torch
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands requests' caches from a prefill to a decode engine.

    vLLM calls each method; `SchedulerHalf` and `WorkerHalf` document what it does. An instance has the half
    that its role names.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = _settings(self._kv_transfer_config.kv_connector_extra_config)
        groups = groups_of(kv_cache_config)
        _require_supported(vllm_config)
        engine_id = str(self._kv_transfer_config.engine_id)
        # Failed block ids identify a request only if there is one group. The engine can recompute from the
        # first failed block only if no earlier block has left a window.
        self._reports_blocks = len(kv_cache_config.kv_cache_groups) == 1 and not (
            groups[0].window or groups[0].is_state
        )
        # The prefix cache may have a prompt's beginning without its state: every handover brings the state.
        # A handover does not bring the blocks that a window looks at.
        self._brings_states = any(group.is_state for group in groups) and not any(
            group.window for group in groups
        )
        self._saves_by_layer = not getattr(vllm_config.parallel_config, "use_ubatching", False)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._waits = settings.waits
        if self._waits and not self._reports_blocks:
            raise ValueError(
                'loads "synchronous" needs a cache of one group, without a window or states: leave it '
                '"asynchronous"'
            )
        if settings.require_transfer and self._kv_transfer_config.is_kv_consumer:
            _require_refusable(self._kv_transfer_config.kv_load_failure_policy)
        self._invalid_block_ids: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            roles = self._kv_transfer_config
            self._scheduler = SchedulerHalf(
                engine_id,
                roles.is_kv_producer,
                roles.is_kv_consumer,
                groups,
                kv_cache_config.num_blocks,
                settings,
                # The engine gives data-parallel ranks ids of this form; the rank may not be known otherwise.
                shares_samples=re.search(r"_dp[0-9]+$", engine_id) is not None,
            )
        else:
            self._position = position = _position(vllm_config, engine_id)
            self._groups = groups
            self._cache = ModelCache.of(vllm_config, kv_cache_config.num_blocks, settings.model)
            stream = None if position.gpu is None else TorchStream(position.gpu)
            self._worker = WorkerHalf(position, settings, stream)
            self._has_sent_rank = False

    # ---- beside the scheduler ---------------------------------------------------------------

    @property
    def _deciding(self) -> SchedulerHalf:
        assert self._scheduler is not None, "this connector was made for a worker"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        # In a MultiConnector this may be another child's metadata; then ours come with the first step.
        ours = {position: each.rank for position, each in metadata.items() if isinstance(each, RankMetadata)}
        if ours:
            self._deciding.set_ranks(ours)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self._brings_states

    def on_new_request(self, request: Request) -> None:
        self._deciding.arrived(VllmRequest(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count = self._deciding.num_external_tokens(VllmRequest(request), num_computed_tokens)
        return count, bool(count) and not self._waits

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._deciding.allocated(VllmRequest(request), blocks.get_block_ids(), num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        blocks = scheduler_output.kv_connector_block_state
        step = self._deciding.step(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.preempted_req_ids or set(),
            lambda request_id: None if blocks is None else blocks.get_block_ids(request_id),
        )
        return StepMetadata(step)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        workers = connector_output.kv_connector_worker_meta
        if isinstance(workers, WorkerMetadata):
            if workers.ranks:
                self._deciding.set_ranks(workers.ranks)
            self._deciding.heard(workers.news)
        self._deciding.received(connector_output.finished_recving or set())
        self._deciding.given_back(connector_output.finished_sending or set())

    def has_pending_block_frees(self) -> bool:
        return self._deciding.frees_blocks_soon()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        seen = VllmRequest(request)
        return self._deciding.finished(seen, block_ids, seen.is_whole)

    # ---- beside a worker --------------------------------------------------------------------

    @property
    def _moving(self) -> WorkerHalf:
        assert self._worker is not None, "this connector was made for the scheduler"
        return self._worker

    @property
    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.step

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._moving.register(memory_of(self._groups, kv_caches, self._cache, self._position))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return RankMetadata(self._moving.rank)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._moving.before_forward(kv_connector_metadata.step)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        news = self._moving.take_news()
        ranks = {}
        if not self._has_sent_rank:
            self._has_sent_rank = True
            ranks[self._position.pp_rank, self._position.tp_rank] = self._moving.rank
        return WorkerMetadata(ranks, news or News()) if ranks or news else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._moving.step(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._waits:
            self._moving.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        # With two overlapped batches, a call means half a batch; then layers are released at the step's end.
        if self._saves_by_layer:
            self._moving.layer_done(layer_name)

    def wait_for_save(self) -> None:
        # vLLM also calls this when the forward raised; then its results must not be handed over.
        self._moving.after_forward(whole=sys.exc_info()[0] is None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._moving.collect(finished_req_ids, self._step.num_running)
        if self._reports_blocks:
            self._invalid_block_ids.update(*results.failed.values())
        return KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.received,
            failed_recving=set() if self._reports_blocks else set(results.failed),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        found, self._invalid_block_ids = self._invalid_block_ids, set()
        return found

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # A graph of a whole forward would not wait for loads layer by layer. Pushes do not need piecewise
        # graphs: with a whole graph, their layers go at its end.
        return _settings(extra_config).waits

    # ---- sleep, from vLLM 0.33 on -----------------------------------------------------------

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        self._moving.sleep()

    def restore_kv_caches(self) -> None:
        self._moving.wake()

    # ---- statistics -------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self._worker or self._deciding
        counts = half.take_statistics()
        return None if counts is None else TransferStatistics(counts.data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return TransferStatistics() if data is None else TransferStatistics(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- the end ----------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _require_supported(config: VllmConfig) -> None:
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise NotImplementedError(f"KvxferConnector cannot hand over with {name} {size} yet: use 1")


def _require_refusable(policy: str) -> None:
    # A connector can end a request only by failing its load.
    if policy != "fail":
        raise ValueError(
            f'require_transfer needs kv_load_failure_policy "fail", but it is "{policy}", with which vLLM '
            "computes what was not loaded. Leave out one of the two"
        )


def _settings(extra_config: dict[str, Any]) -> Settings:
    return Settings.of(extra_config, "kv_connector_extra_config of KvxferConnector")


def _position(config: VllmConfig, engine_id: str) -> WorkerRank:
    import torch
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return WorkerRank(
        engine_id=engine_id,
        tp_rank=get_tensor_model_parallel_rank(),
        tp_size=config.parallel_config.tensor_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
        pp_size=config.parallel_config.pipeline_parallel_size,
        gpu=torch.cuda.current_device() if current_platform.is_cuda() else None,
        dp_rank=config.parallel_config.data_parallel_index,
    )
