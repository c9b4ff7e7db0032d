"""The connector class that TensorRT-LLM makes on every rank."""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import PurePath
from typing import Any, Final

import kvxfer
from kvxfer.connectors.common.statistics import Counts
from kvxfer.connectors.common.step import FetchOrder, News, OwnRank, Step
from kvxfer.connectors.common.worker_half import WorkerHalf
from kvxfer.connectors.common.worker_rank import WorkerRank
from kvxfer.connectors.trtllm import interface
from kvxfer.connectors.trtllm.agreement import Agreement
from kvxfer.connectors.trtllm.executor_settings import settings_of_environment
from kvxfer.connectors.trtllm.local_worker import Listener, Registered, introduce
from kvxfer.connectors.trtllm.pools import Pools, gpu_of, pools_of_layout, pools_of_tensor
from kvxfer.connectors.trtllm.recomputing import show_parked, take_back

_log = logging.getLogger("kvxfer")

_REPORT_EVERY_S: Final = 60.0


class EngineStream:
    """The stream that the engine names in each call; its kernels run there, one after the other."""

    def __init__(self) -> None:
        self.current: Any = None

    def record(self, trigger: kvxfer.Trigger, value: int) -> None:
        trigger.record(self.current, value)

    def hold(self, work: kvxfer.Group, layer: int) -> bool:
        return False  # no forward waits for a load: only the loading request waits


class KvxferConnectorWorker(interface.module.KvCacheConnectorWorker):
    """Transfers this rank's share of the caches.

    The engine calls each method; `WorkerHalf` documents what it does. All ranks are at the same place of the
    engine's loop when the engine registers its cache, and when it asks what has ended. The ranks agree there.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._settings = settings_of_environment()
        self._settings.begin_log()
        _require_supported(llm_args)
        if self._settings.failed_loads == "recompute":
            show_parked(interface.module.KvCacheConnectorManager)
        self._stream = self._engine_stream()
        self._half: WorkerHalf | None = None
        self._agreement = Agreement(self._gather)
        self._steps: list[Step] = []  # bound, but not begun
        self._num_running = 0
        self._is_idle = True  # no step was bound in this iteration of the loop
        self._orders: dict[str, FetchOrder] = {}  # fetches that have not ended on every rank
        self._started: set[str] = set()  # orders that the engine has reported as started
        self._received: set[str] = set()  # orders that ended before the engine reported them as started
        self._through: set[str] = set()  # orders that have ended on this rank
        self._aborted: set[str] = set()  # orders whose request has ended meanwhile
        self._parked: dict[int, Any] = {}
        self._reported_at = time.monotonic()
        self.registered: Registered | None = None
        self.listener: Listener | None = None
        introduce(llm_args, self)

    def _engine_stream(self) -> EngineStream:
        return EngineStream()

    # ---- the cache --------------------------------------------------------------------------

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        block_size = self._llm_args.kv_cache_config.tokens_per_block
        self._register(
            gpu_of(kv_cache_tensor),
            lambda position: pools_of_tensor(
                kv_cache_tensor, block_size, position, self._model, self._settings.kv_heads
            ),
        )

    def register_kv_cache_layout(self, layout: Any) -> None:
        if getattr(self._llm_args, "enable_chunked_prefill", False) and self._settings.consumes:
            raise NotImplementedError(
                "kvxfer cannot load into a cache of layer groups that is allocated chunk by chunk: turn off "
                'enable_chunked_prefill at this engine, or make it "role": "prefill"'
            )
        if self._settings.failed_loads == "recompute" and self._settings.consumes:
            raise NotImplementedError(
                "kvxfer cannot make this engine recompute a request whose cache has layer groups: set "
                '"failed_loads": "stop", with which a failed load ends the engine\'s loop'
            )
        tensor = layout.groups[0].regions[0].as_tensor() if layout.groups else None
        self._register(gpu_of(tensor), lambda position: pools_of_layout(layout, position, self._model))

    @property
    def _model(self) -> str:
        return self._settings.shared.model or PurePath(str(self._llm_args.model)).name

    def _register(self, gpu: int | None, pools_at: Any) -> None:
        """Registers the cache on every rank, or fails on every rank."""
        self.shutdown()  # an engine may profile with one cache and serve with another
        engine_id = self._settings.engine_id or str(self._broadcast(secrets.token_hex(8)))
        position = WorkerRank(engine_id, tp_rank=_rank(), tp_size=_world_size(self._llm_args), gpu=gpu)
        pools: Pools | None = None
        own: OwnRank | str
        try:
            pools = pools_at(position)
            shared = self._settings.shared
            # The first port belongs to the register.
            shared = shared.model_copy(update={"port": shared.port + 1 if shared.port else 0})
            self._half = WorkerHalf(position, shared, None if gpu is None else self._stream)
            self._half.register(pools.memory)
            own = self._half.rank
        except Exception as error:
            own = f"rank {position.tp_rank}: {error}"
            if position.tp_size == 1:
                self.shutdown()
                raise
        ranks = self._gather(own)
        if errors := [each for each in ranks if isinstance(each, str)]:
            self.shutdown()
            raise NotImplementedError(f"kvxfer: the cache cannot be registered: {'; '.join(errors)}")
        assert pools is not None
        self.registered = Registered(engine_id, pools, tuple(ranks))

    @property
    def _moving(self) -> WorkerHalf:
        assert self._half is not None, "the engine steps before it has registered its cache"
        return self._half

    # ---- a step -----------------------------------------------------------------------------

    def bind_connector_meta(self, metadata: object) -> None:
        super().bind_connector_meta(metadata)
        assert isinstance(metadata, Step)
        # If no forward follows, `get_finished` begins the step.
        self._steps.append(metadata)
        self._is_idle = False

    def start_load_kv(self, stream: Any) -> None:
        self._stream.current = stream
        self._begin()

    def _begin(self) -> None:
        steps, self._steps = self._steps, []
        for step in steps:
            self._orders |= {order.request_id: order for order in step.fetches}
            self._moving.before_forward(step)
            self._moving.step(step)
            self._num_running = step.num_running

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        # Nothing to wait for: the engine computes a loading request only when its cache has arrived.
        self._stream.current = stream

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        self._stream.current = stream
        self._moving.layer_done(str(layer_idx))

    def wait_for_save(self, stream: Any) -> None:
        # The engine does not call this if the forward raised.
        self._stream.current = stream
        self._moving.after_forward(whole=True)

    def see_parked(self, parked: dict[int, Any]) -> None:
        """Stores the engine's requests that wait for their loads (`recomputing`)."""
        self._parked = parked

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        self._begin()
        finished = {str(each) for each in finished_gen_req_ids}
        self._started |= {str(each) for each in started_loading_req_ids}
        self._aborted |= finished & self._orders.keys()
        results = self._moving.collect(finished, self._num_running)
        self._num_running = 0
        self._received |= results.received
        received = self._received & self._started
        self._received -= received
        self._started -= received
        failed = set(results.failed)
        sent = results.sent | (received & self._aborted)
        # Report fetches that had ended here before their request was aborted.
        sent |= finished & self._orders.keys() & self._through
        self._through |= received
        news = self._moving.take_news() or News()
        # The engine does not ask its scheduler for a step when it computes nothing, so ask here.
        step = self.listener.idle_step() if self._is_idle and self.listener is not None else None
        self._is_idle = True
        said = self._agreement.reach(received, sent, failed, news, step)
        self._take_back(said.failed)
        for request_id in said.received:
            self._orders.pop(request_id, None)
            self._through.discard(request_id)
            self._aborted.discard(request_id)
        if said.step is not None:
            self._steps.append(said.step)
            self._begin()
        if self.listener is not None:
            self.listener.agreed(said)
        self._report()
        return [int(each) for each in sent], [int(each) for each in received]

    def _take_back(self, failed: frozenset[str]) -> None:
        """Sets back requests whose loads failed on any rank, before any rank can continue them."""
        for request_id in sorted(failed - self._aborted):
            if self._settings.failed_loads == "stop":
                raise RuntimeError(
                    f"kvxfer: request {request_id}: its cache was promised but not loaded (see the log): the "
                    'engine stops, because it would compute with missing data ("failed_loads": "stop")'
                )
            take_back(self._parked, int(request_id), self._orders[request_id].first_token)

    # ---- among ranks ------------------------------------------------------------------------

    def _gather(self, own: Any) -> list[Any]:
        return [own] if _world_size(self._llm_args) == 1 else list(_mpi().mpi_allgather(own))

    def _broadcast(self, drawn: str) -> Any:
        return drawn if _world_size(self._llm_args) == 1 else _mpi().mpi_broadcast(drawn, root=0)

    # ---- statistics, and the end ------------------------------------------------------------

    def take_statistics(self) -> Counts | None:
        """Returns the counts since the last call (`WorkerHalf.take_statistics`)."""
        return self._moving.take_statistics()

    def _report(self) -> None:
        """Logs the counters once an interval: the engine does not ask a connector for metrics."""
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_EVERY_S and (counts := self.take_statistics()) is not None:
            said = ", ".join(f"{name} {value}" for name, value in counts.reduce().items())
            _log.info("kvxfer: in the last %.0f s: %s", now - self._reported_at, said)
            self._reported_at = now

    def shutdown(self) -> None:
        """Ends all transfers. The engine's interface has no such call; agents end with their process."""
        half, self._half = self._half, None
        if half is not None:
            half.close()


def _mpi() -> Any:
    import tensorrt_llm._utils

    return tensorrt_llm._utils


def _rank() -> int:
    return int(_mpi().mpi_rank())


def _world_size(llm_args: Any) -> int:
    return int(llm_args.tensor_parallel_size)


def _require_supported(llm_args: Any) -> None:
    for name in ("pipeline_parallel_size", "context_parallel_size"):
        if (size := getattr(llm_args, name, 1) or 1) > 1:
            raise NotImplementedError(f"kvxfer cannot hand over with {name} {size}: use 1")
    if getattr(llm_args, "enable_attention_dp", False):
        raise NotImplementedError("kvxfer cannot hand over with enable_attention_dp yet: turn it off")
