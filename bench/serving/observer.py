"""Observes any connector of vLLM: when a request passes each of its methods, and what those cost.

Engines load it by ``kv_connector_module_path``; ``kv_connector`` stays the connector's own name. This
module returns a subclass that behaves as its base does. Observations go to files in the folder that
``KVXFER_SERVING_OBSERVED`` names, one for each half of a connector (`kvxfer.bench.serving.events`).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kvxfer.bench.serving.events import COSTS, FOLDER_VARIABLE, Event

Method = TypeVar("Method", bound=Callable[..., Any])

# Carried to the workers in a step's metadata, beside the connector's own content.
_ORDERS = "_kvxfer_serving_orders"

# Methods that the engine's loop or its model calls. Others are called once, at the start or the end.
_METHODS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("get_loaded_kv_cache_group_ids", "update_connector_output", "request_finished"),
    *("request_finished_all_groups", "has_pending_push_work", "has_pending_block_frees", "take_events"),
    *("bind_connector_metadata", "clear_connector_metadata", "handle_preemptions", "start_load_kv"),
    *("wait_for_layer_load", "save_kv_layer", "wait_for_save", "finish_forward", "get_finished"),
    *("get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats"),
    *("get_kv_connector_kv_cache_events", "build_connector_worker_meta"),
)
# One of these is called in each step, at the scheduler and at each worker.
_ONCE_A_STEP = ("build_connector_meta", "start_load_kv")


class Log:
    """The record of one half of a connector. It is written between the connector's calls, not in one."""

    def __init__(self, half: str) -> None:
        path = Path(os.environ[FOLDER_VARIABLE]) / f"{half}-{os.getpid()}-{time.monotonic_ns()}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._half = half
        self._lines: list[str] = []
        self.num_steps = 0
        self.total_ns = 0
        self.depth = 0

    def event(self, name: Event, request_id: str, at_ns: int, **fields: int) -> None:
        """Notes what happened to a request."""
        self._lines.append(json.dumps({"event": name, "request": request_id, "at_ns": at_ns, **fields}))

    def write(self) -> None:
        """Writes the noted events, if there are any, and the methods' time until now."""
        if not self._lines:
            return
        costs = {"half": self._half, "steps": self.num_steps, "total_ns": self.total_ns}
        self._lines.append(json.dumps({"event": COSTS, **costs}))
        os.write(self._descriptor, ("\n".join(self._lines) + "\n").encode())
        self._lines.clear()


def observed(connector: type[Any]) -> type[Any]:
    """Returns a class that behaves as ``connector`` does, and writes down when it was called."""
    timed = {name: _timed(name, getattr(connector, name)) for name in _METHODS if hasattr(connector, name)}
    return type(connector.__name__, (_Observer, type(f"Timed{connector.__name__}", (connector,), timed)), {})


def _timed(name: str, method: Method) -> Method:
    num_steps = int(name in _ONCE_A_STEP)

    @functools.wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        log: Log = self.kvxfer_log
        log.depth += 1
        start_ns = time.monotonic_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            elapsed_ns = time.monotonic_ns() - start_ns
            log.depth -= 1
            # A method's time already includes its calls to other methods of the connector.
            if not log.depth:
                log.total_ns += elapsed_ns
                log.num_steps += num_steps

    return timed  # type: ignore[return-value]


class _Observer:
    """Wraps a connector's class. Every method calls the connector's, and then notes the time."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.kvxfer_log = Log(role.name.lower())
        self._asked: set[str] = set()
        self._allocated: list[str] = []
        # The connector itself, without the observer.
        self._base: Any = super()
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]

    # ---- beside the scheduler ---------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        start_ns = time.monotonic_ns()
        found = self._base.get_num_new_matched_tokens(request, num_computed_tokens)
        took_ns = time.monotonic_ns() - start_ns
        # The engine asks again in every step about a request for which it has no room.
        if found[0] and found[1] and request.request_id not in self._asked:
            self._asked.add(request.request_id)
            self.kvxfer_log.event("asked", request.request_id, start_ns, took_ns=took_ns)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        start_ns = time.monotonic_ns()
        self._base.update_state_after_alloc(request, blocks, num_external_tokens)
        end_ns = time.monotonic_ns()
        if num_external_tokens:
            self._asked.discard(request.request_id)
            self._allocated.append(request.request_id)
            self.kvxfer_log.event("allocated", request.request_id, end_ns, took_ns=end_ns - start_ns)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = self._base.build_connector_meta(scheduler_output)
        if self._allocated:
            setattr(metadata, _ORDERS, tuple(self._allocated))
            self._allocated.clear()
        self.kvxfer_log.write()
        return metadata

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return self._finished(request, self._base.request_finished, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self._finished(request, self._base.request_finished_all_groups, block_ids)

    def _finished(self, request: Any, method: Callable[..., Any], block_ids: Any) -> Any:
        start_ns = time.monotonic_ns()
        found = method(request, block_ids)
        took_ns = time.monotonic_ns() - start_ns
        if found[0]:  # its blocks stay, so it is handed over
            self.kvxfer_log.event("finished", request.request_id, start_ns, took_ns=took_ns)
            self.kvxfer_log.write()
        return found

    # ---- beside a worker --------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        start_ns = time.monotonic_ns()
        self._base.start_load_kv(forward_context, **kwargs)
        took_ns = time.monotonic_ns() - start_ns
        for request_id in getattr(self._base._get_connector_metadata(), _ORDERS, ()):
            self.kvxfer_log.event("ordered", request_id, start_ns, took_ns=took_ns)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        start_ns = time.monotonic_ns()
        results = self._base.get_transfer_results(finished_req_ids)
        end_ns = time.monotonic_ns()
        for request_id in results.finished_recving or ():
            failed = request_id in (results.failed_recving or ())
            took_ns = end_ns - start_ns
            self.kvxfer_log.event("loaded", request_id, end_ns, took_ns=took_ns, failed=int(failed))
        return results

    def clear_connector_metadata(self) -> None:
        self._base.clear_connector_metadata()
        self.kvxfer_log.write()


@functools.cache
def _observed_by_name(name: str) -> type[Any]:
    # Connectors of other packages, including kvxfer's, register there.
    importlib.import_module("vllm.plugins").load_general_plugins()
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    return observed(factory.KVConnectorFactory.get_connector_class_by_name(name))


def __getattr__(name: str) -> type[Any]:
    # The engine asks this module for the class that ``kv_connector`` names.
    if not name.endswith("Connector"):
        raise AttributeError(name)
    return _observed_by_name(name)
