"""The names of NIXL 1.5.1's bindings, implemented by kvxfer's raw agent."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.connectors.nixl.descriptor_lists import (
    DescriptorList,
    Rows,
    as_bytes,
    nixlRegDList,
    nixlRemoteDList,
    nixlXferDList,
    rows_of_array,
    rows_of_strided,
)
from kvxfer.connectors.nixl.environment import agent_options, captures_telemetry, metadata_store
from kvxfer.connectors.nixl.metadata_store import WHOLE, MetadataStore
from kvxfer.connectors.nixl.statuses import (
    NixlError,
    asked,
    nixl_cost_t,
    nixl_mem_t,
    nixl_status_t,
    nixl_thread_sync_t,
    nixl_xfer_op_t,
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)
from kvxfer.raw_agent import RawAgent, Request

DEFAULT_COMM_PORT = 8888
HAVE_UCX_GPU_DEVICE_API = False
NIXL_INIT_AGENT = ""
# Backend names that kvxfer answers to. UCX is one of them, because nearly all programs name it by default.
BACKENDS = ("KVXFER", "UCX")

globals().update(nixl_mem_t.__members__)
globals().update(nixl_xfer_op_t.__members__)
globals().update(nixl_status_t.__members__)
globals().update(nixl_thread_sync_t.__members__)
globals().update(nixl_cost_t.__members__)


class nixlAgentConfig:
    """The configuration of an agent. A raw agent needs none of the threads, and telemetry is free."""

    def __init__(
        self,
        useProgThread: bool = False,
        useListenThread: bool = False,
        listenPort: int = 0,
        syncMode: nixl_thread_sync_t = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT,
        pthrDelay: int = 0,
        lthrDelay: int = 100000,
        captureTelemetry: bool = False,
        etcdWatchTimeout: int = 5000000,
    ) -> None:
        self.useProgThread = useProgThread
        self.useListenThread = useListenThread
        self.listenPort = listenPort
        self.syncMode = syncMode
        self.pthrDelay = pthrDelay
        self.lthrDelay = lthrDelay
        self.captureTelemetry = captureTelemetry
        self.etcdWatchTimeout = etcdWatchTimeout


class nixlXferTelemetry:
    """The times, bytes and descriptors of a transfer; times in microseconds."""

    def __init__(self) -> None:
        self.startTime = 0
        self.postDuration = 0
        self.xferDuration = 0
        self.totalBytes = 0
        self.descCount = 0


def _entries(indices: Any, num: int) -> NDArray[np.uint32]:
    """Returns indices into a list of `num` descriptors; checks them before it expands or narrows them."""
    is_range = isinstance(indices, range)
    array = np.array([indices[0], indices[-1]]) if is_range and indices else np.asarray(indices)
    if array.ndim != 1 or (len(array) and (array.dtype.kind not in "iu" or array.min() < 0)):
        raise nixlInvalidParamError(
            "indices must be a list or a 1-D array of integers, none of them negative"
        )
    if len(array) and (largest := int(array.max())) >= num:
        raise nixlInvalidParamError(
            f"index {largest} is outside the list, which has {num} descriptors", "out-of-range"
        )
    return np.ascontiguousarray(indices if is_range else array, np.uint32)


class nixlAgent:
    """An agent with the methods of NIXL's bindings; lists and transfers have numbers as handles."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        if not name:
            raise ValueError("an agent needs a name")
        options, timeout_s = agent_options(config.listenPort if config.useListenThread else None)
        exchanges = config.useListenThread
        self._name = name
        self._captures_telemetry = captures_telemetry(config.captureTelemetry)
        self._fetch_s = config.etcdWatchTimeout / 1e6
        self._store: MetadataStore | None = None
        self._raw_agent = asked(lambda: RawAgent(name, options, timeout_s, exchanges=exchanges))
        self._lock = threading.Lock()
        self._next = 1
        self._backends: dict[int, str] = {}
        # For each list, the agent that owns the memory (None: this agent, as the near end) and the list.
        self._lists: dict[int, tuple[str | None, Any]] = {}
        self._requests: dict[int, Request] = {}
        self._notify: dict[int, bytes] = {}

    def _number(self) -> int:
        with self._lock:
            self._next += 1
            return self._next - 1

    # ---- backends

    def getAvailPlugins(self) -> list[str]:
        return list(BACKENDS)

    def getPluginParams(self, plugin: str) -> tuple[dict[str, str], list[str]]:
        if plugin not in BACKENDS:
            raise nixlNotFoundError(
                f"there is no plug-in {plugin!r}: kvxfer's plug-ins are {' and '.join(BACKENDS)}"
            )
        return {}, ["DRAM_SEG", "VRAM_SEG"]

    def createBackend(self, backend: str, params: Mapping[str, str]) -> int:
        self.getPluginParams(backend)
        if backend in self._backends.values():
            raise nixlInvalidParamError(f"backend {backend} exists already")
        number = self._number()
        self._backends[number] = backend
        return number

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        return self.getPluginParams(self._backends[backend])

    # ---- memory

    def _kind(self, type: nixl_mem_t) -> bool:
        """Returns whether a kind of memory is on a GPU."""
        if type > nixl_mem_t.VRAM_SEG:
            raise nixlNotSupportedError(f"kvxfer moves host and GPU memory, not {type.name}")
        return type == nixl_mem_t.VRAM_SEG

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        if descs.isEmpty():
            raise nixlBackendError("the list of memory to register is empty")
        is_gpu = self._kind(descs.getType())
        asked(lambda: self._raw_agent.register(descs.rows, is_gpu=is_gpu))
        return nixl_status_t.NIXL_SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        is_gpu = self._kind(descs.getType())
        asked(lambda: self._raw_agent.deregister(descs.rows, is_gpu=is_gpu))
        return nixl_status_t.NIXL_SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        raise nixlNotSupportedError("host and GPU memory cannot be queried")

    # ---- metadata

    def getLocalMD(self) -> bytes:
        return self._raw_agent.metadata()

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        is_gpu = self._kind(descs.getType())
        return asked(
            lambda: self._raw_agent.metadata_of(descs.rows, is_gpu=is_gpu, with_address=bool(inc_conn_info))
        )

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        return asked(lambda: self._raw_agent.add_remote(metadata)).encode()

    def invalidateRemoteMD(self, agent: str | bytes) -> nixl_status_t:
        if self._store is not None:
            self._store.forget(_as_text(agent))
        try:
            asked(lambda: self._raw_agent.remove_remote(_as_text(agent)))
        except nixlNotFoundError:
            return nixl_status_t.NIXL_ERR_NOT_FOUND
        return nixl_status_t.NIXL_SUCCESS

    def checkRemoteMD(self, agent: str | bytes, descs: nixlXferDList) -> nixl_status_t:
        is_gpu = not descs.isEmpty() and self._kind(descs.getType())
        known = self._raw_agent.has_remote(_as_text(agent), descs.rows, is_gpu=is_gpu)
        return nixl_status_t.NIXL_SUCCESS if known else nixl_status_t.NIXL_ERR_NOT_FOUND

    def makeConnection(self, agent: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:
        asked(lambda: self._raw_agent.connect(_as_text(agent)))
        return nixl_status_t.NIXL_SUCCESS

    def _stored(self) -> MetadataStore:
        """Returns the store for metadata that are sent without an address; the first call makes it."""
        with self._lock:
            if self._store is None:
                self._store = asked(lambda: metadata_store(self._raw_agent, self._name, self._fetch_s))
                self._ends = weakref.finalize(self, self._store.close)
            return self._store

    def close(self) -> None:
        """Ends the agent. Like NIXL's agent, it also ends when it is no longer used."""
        if self._store is not None:
            self._ends()
        self._raw_agent.close()

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        if ip_addr:
            asked(lambda: self._raw_agent.withdraw(_address(ip_addr, port)))
            return
        self._raw_agent.invalidate()
        asked(self._stored().withdraw)

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        self._send(self._raw_agent.metadata(), ip_addr, port, WHOLE)

    def sendLocalPartialMD(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[int] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        if not ip_addr and not label:
            raise nixlInvalidParamError("metadata of a part of the memory are stored under a label: pass one")
        self._send(self.getLocalPartialMD(descs, inc_conn_info), ip_addr, port, label)

    def _send(self, metadata: bytes, ip_addr: str, port: int, label: str) -> None:
        if ip_addr:
            asked(lambda: self._raw_agent.tell(_address(ip_addr, port), metadata))
        else:
            asked(lambda: self._stored().send(label, metadata))

    def fetchRemoteMD(
        self, remote_agent: str | bytes, ip_addr: str = "", port: int = 0, label: str = ""
    ) -> None:
        name = _as_text(remote_agent)
        if ip_addr:
            asked(lambda: self._raw_agent.ask(_address(ip_addr, port), name))
        else:
            self._stored().fetch(name, label or WHOLE)

    # ---- lists

    def prepXferDlist(self, *args: Any, **kwargs: Any) -> int:
        """Takes (agent, descs), (descs), or (agent, mem_type, N x 5 or N x 3 array), and then backends."""
        named = list(args)
        if named and isinstance(named[0], DescriptorList):
            named.insert(0, NIXL_INIT_AGENT)
        agent = _as_text(named[0] if named else kwargs.get("agent_name", NIXL_INIT_AGENT))
        descs = named[1] if len(named) > 1 else kwargs.get("descs")
        if isinstance(descs, nixl_mem_t):
            array, kind = (named[2] if len(named) > 2 else kwargs["descs"]), descs
            is_strided = array.ndim == 2 and array.shape[1] == 5
            rows = rows_of_strided(array) if is_strided else rows_of_array(array)
        elif isinstance(descs, nixlXferDList):
            rows, kind = descs.rows, descs.getType()
        else:
            raise TypeError(
                "prepXferDlist takes a nixlXferDList, or a memory type and an N x 5 or N x 3 array"
            )
        if not len(rows):
            raise nixlNotFoundError("the list is empty")
        return self._prepare(agent, rows, self._kind(kind))

    def _prepared(self, agent: str, rows: Rows, is_gpu: bool) -> Any:
        return asked(lambda: self._raw_agent.prepare(agent, rows, is_gpu=is_gpu))

    def _prepare(self, agent: str, rows: Rows, is_gpu: bool) -> int:
        prepared = self._prepared(agent, rows, is_gpu)
        number = self._number()
        self._lists[number] = (agent or None, prepared)
        return number

    def releasedDlistH(self, handle: int) -> nixl_status_t:
        self._lists.pop(handle, None)
        return nixl_status_t.NIXL_SUCCESS

    # ---- transfers

    def makeXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_side: int,
        local_indices: Any,
        remote_side: int,
        remote_indices: Any,
        notif_msg: bytes | str = b"",
        backend: Sequence[int] = (),
        skip_desc_merg: bool = False,
    ) -> int:
        near, far = self._lists.get(local_side), self._lists.get(remote_side)
        if near is None or far is None or near[0] is not None or far[0] is None:
            raise nixlInvalidParamError(
                "the local list must belong to this agent, the remote list to a remote agent"
            )
        chosen = _entries(local_indices, len(near[1])), _entries(remote_indices, len(far[1]))
        return self._make(operation, near[1], chosen[0], far[1], chosen[1], far[0], notif_msg)

    def createXferReq(
        self,
        operation: nixl_xfer_op_t,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backend: Sequence[int] = (),
    ) -> int:
        agent = _as_text(remote_agent)
        near = self._prepared("", local_descs.rows, self._kind(local_descs.getType()))
        far = self._prepared(agent, remote_descs.rows, self._kind(remote_descs.getType()))
        return self._make(operation, near, None, far, None, agent, notif_msg)

    def _make(
        self,
        operation: nixl_xfer_op_t,
        near: Any,
        near_entries: Any,
        far: Any,
        far_entries: Any,
        agent: str,
        notif_msg: bytes | str,
    ) -> int:
        made = asked(
            lambda: self._raw_agent.make(
                near,
                far,
                is_write=operation == nixl_xfer_op_t.NIXL_WRITE,
                remote_agent=agent,
                local_entries=near_entries,
                remote_entries=far_entries,
            )
        )
        number = self._number()
        self._requests[number] = made
        self._notify[number] = as_bytes(notif_msg)
        return number

    def _request(self, handle: int) -> Request:
        request = self._requests.get(handle)
        if request is None:
            raise nixlInvalidParamError("the handle was released")
        return request

    def postXferReq(self, reqh: int, notif_msg: bytes | str = b"") -> nixl_status_t:
        request = self._request(reqh)
        if notif_msg:
            self._notify[reqh] = as_bytes(notif_msg)
        done = asked(lambda: request.post(self._notify[reqh]))
        return nixl_status_t.NIXL_SUCCESS if done else nixl_status_t.NIXL_IN_PROG

    def getXferStatus(self, reqh: int) -> nixl_status_t:
        request = self._request(reqh)
        if not request.times_ns[0]:
            raise nixlNotPostedError("the transfer was not posted")
        return nixl_status_t.NIXL_SUCCESS if asked(request.is_done) else nixl_status_t.NIXL_IN_PROG

    def releaseXferReq(self, reqh: int) -> nixl_status_t:
        request = self._requests.pop(reqh, None)
        notify = self._notify.pop(reqh, b"")
        if request is not None:
            try:
                asked(request.release)
            except NixlError:
                self._requests[reqh], self._notify[reqh] = request, notify  # it may be released again
                raise
        return nixl_status_t.NIXL_SUCCESS

    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:
        posted_ns, begun_ns, ended_ns = (request := self._request(reqh)).times_ns
        if not self._captures_telemetry or not posted_ns:
            raise nixlNoTelemetryError("the agent was made without capture_telemetry, or nothing was posted")
        out = nixlXferTelemetry()
        out.startTime = (time.time_ns() - time.monotonic_ns() + posted_ns) // 1000
        # Round up: a shorter time counts as one microsecond.
        out.postDuration = max(1, -(-(begun_ns - posted_ns) // 1000))
        out.xferDuration = max(out.postDuration, -(-((ended_ns or time.monotonic_ns()) - posted_ns) // 1000))
        out.totalBytes = request.nbytes
        out.descCount = request.num_descriptors
        return out

    def queryXferBackend(self, reqh: int) -> int:
        self._request(reqh)
        return next(iter(self._backends))

    def estimateXferCost(self, req_handle: int) -> tuple[int, int, int]:
        self._request(req_handle)
        return 0, 0, -1

    # ---- notifications

    def getNotifs(
        self, notif_map: Mapping[str, Sequence[bytes]], backends: Sequence[int] = ()
    ) -> dict[str, list[bytes]]:
        out = {agent: list(told) for agent, told in notif_map.items()}
        for agent, payload in self._raw_agent.take_notifications():
            out.setdefault(agent, []).append(payload)
        return out

    def genNotif(self, remote_agent: str | bytes, msg: bytes | str, backends: Any = ()) -> nixl_status_t:
        asked(lambda: self._raw_agent.notify(_as_text(remote_agent), as_bytes(msg)))
        return nixl_status_t.NIXL_SUCCESS

    # ---- a GPU's own transfers

    def prepMemView(self, *args: Any, **kwargs: Any) -> int:
        raise nixlNotSupportedError(
            "GPU kernels reach remote memory through kvxfer.gpu, not through memory views"
        )

    def releaseMemView(self, mvh: int) -> None:
        raise nixlNotSupportedError("kvxfer has no memory views")


def _as_text(name: str | bytes) -> str:
    try:
        return name.decode() if isinstance(name, bytes) else name.encode().decode()
    except UnicodeError:
        raise nixlInvalidParamError(f"an agent's name is UTF-8, and {name!r} is not") from None


def _address(ip_addr: str, port: int) -> str:
    host = f"[{ip_addr}]" if ":" in ip_addr else ip_addr
    return f"tcp://{host}:{port or DEFAULT_COMM_PORT}"


# Also exports the enumerations' members under their own names.
__all__ = [
    "BACKENDS",
    "DEFAULT_COMM_PORT",
    "HAVE_UCX_GPU_DEVICE_API",
    "NIXL_INIT_AGENT",
    "DescriptorList",
    "nixlAgent",
    "nixlAgentConfig",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_cost_t",
    "nixl_mem_t",
    "nixl_status_t",
    "nixl_thread_sync_t",
    "nixl_xfer_op_t",
]
