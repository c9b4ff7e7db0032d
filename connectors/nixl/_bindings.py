"""What NIXL 1.5.1 calls its bindings: the same names, kept by kvxfer's native door.

Errors are NIXL's classes, so that ``except`` clauses hold; their words, ``code`` and cause are kvxfer's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvxfer.door import Door, Request, rows_of
from kvxfer.errors import KvxferError
from kvxfer.options import AgentOptions

DEFAULT_COMM_PORT = 8888
HAVE_UCX_GPU_DEVICE_API = False
NIXL_INIT_AGENT = ""
# As whose backend it goes: programs that name UCX, as nearly all do by default, have it as well.
BACKENDS = ("KVXFER", "UCX")

Rows = NDArray[np.uint64]
T = TypeVar("T")


class _Number(IntEnum):
    """A number of NIXL's with a name, printed as it prints them."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class nixl_mem_t(_Number):
    """Kinds of memory; files, blocks and objects are none of kvxfer's."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(_Number):
    """Which way bytes go."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_status_t(_Number):
    """How a call, or a transfer, stands."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class nixl_thread_sync_t(_Number):
    """How callers' threads share an agent; a door's may all use it at once, whichever is asked for."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


class nixl_cost_t(_Number):
    """By what a cost was estimated."""

    NIXL_COST_ANALYTICAL_BACKEND = 0


globals().update(nixl_mem_t.__members__)
globals().update(nixl_xfer_op_t.__members__)
globals().update(nixl_status_t.__members__)
globals().update(nixl_thread_sync_t.__members__)
globals().update(nixl_cost_t.__members__)


class _Error(Exception):
    """An error of NIXL's. ``code`` is kvxfer's word for what happened, or ``""``."""

    status = "NIXL_ERR_UNKNOWN"

    def __init__(self, message: str = "", code: str = "") -> None:
        super().__init__(f"{self.status}: {message}" if message else self.status)
        self.code = code


class nixlNotPostedError(_Error):
    status = "NIXL_ERR_NOT_POSTED"


class nixlInvalidParamError(_Error):
    status = "NIXL_ERR_INVALID_PARAM"


class nixlBackendError(_Error):
    status = "NIXL_ERR_BACKEND"


class nixlNotFoundError(_Error):
    status = "NIXL_ERR_NOT_FOUND"


class nixlMismatchError(_Error):
    status = "NIXL_ERR_MISMATCH"


class nixlNotAllowedError(_Error):
    status = "NIXL_ERR_NOT_ALLOWED"


class nixlRepostActiveError(_Error):
    status = "NIXL_ERR_REPOST_ACTIVE"


class nixlUnknownError(_Error):
    status = "NIXL_ERR_UNKNOWN"


class nixlNotSupportedError(_Error):
    status = "NIXL_ERR_NOT_SUPPORTED"


class nixlRemoteDisconnectError(_Error):
    status = "NIXL_ERR_REMOTE_DISCONNECT"


class nixlCancelledError(_Error):
    status = "NIXL_ERR_CANCELED"


class nixlNoTelemetryError(_Error):
    status = "NIXL_ERR_NO_TELEMETRY"


_ERROR_OF: dict[str, type[_Error]] = {
    **dict.fromkeys(
        ("invalid-argument", "out-of-range", "duplicate-block", "length-mismatch", "layout-mismatch"),
        nixlInvalidParamError,
    ),
    **dict.fromkeys(("unknown-region", "region-gone"), nixlNotFoundError),
    **dict.fromkeys(("not-permitted", "lease-ended"), nixlNotAllowedError),
    **dict.fromkeys(
        ("peer-lost", "peer-silent", "peer-restarted", "auth-failed", "unreachable", "no-path"),
        nixlRemoteDisconnectError,
    ),
    "protocol": nixlMismatchError,
    "unsupported": nixlNotSupportedError,
    "refused": nixlRepostActiveError,
    "cancelled": nixlCancelledError,
}


def _asked(call: Callable[[], T]) -> T:
    """Returns what the door does, or raises NIXL's error of what it raises."""
    try:
        return call()
    except KvxferError as error:
        raise _ERROR_OF.get(error.code, nixlBackendError)(str(error), error.code) from error


class _DescriptorList:
    """Address, length and device, one row after another."""

    def __init__(self, type: nixl_mem_t, descs: Any = 0, *, init_size: int | None = None) -> None:
        self._type = nixl_mem_t(type)
        self._rows: Rows = np.empty((0, 3), np.uint64)
        self._fill(init_size if init_size is not None else descs)

    def _fill(self, descs: Any) -> None:
        raise NotImplementedError

    def _take_rows(self, descs: Any, width: int) -> None:
        if isinstance(descs, np.ndarray):
            self._rows = _rows_of_array(descs).copy()
        elif isinstance(descs, list):
            self._rows = rows_of(descs, width)
        elif descs:
            self._rows = np.zeros((int(descs), 3), np.uint64)

    @property
    def rows(self) -> Rows:
        """Address, length and device: uint64 [N, 3]. The list's own."""
        return self._rows

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return len(self._rows)

    def isEmpty(self) -> bool:
        return len(self._rows) == 0

    def clear(self) -> None:
        self._rows = np.empty((0, 3), np.uint64)

    def print(self) -> None:
        print(f"DescList of mem type {int(self._type)}")
        for index in range(self.descCount()):
            print(f"    {index}: {self[index]}")

    def _place(self, index: int) -> int:
        if not 0 <= index < len(self._rows):
            raise IndexError("Index is out of range")
        return index

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        address, nbytes, device = self._rows[self._place(index)]
        return int(address), int(nbytes), int(device)

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        self._rows = self._rows.copy()
        self._rows[self._place(index)] = desc[:3]

    def append(self, desc: tuple[Any, ...]) -> None:
        self._rows = np.concatenate([self._rows, rows_of([desc[:3]], 3)])

    def addDesc(self, desc: tuple[Any, ...]) -> None:
        self.append(desc)

    def remDesc(self, index: int) -> None:
        self._rows = np.delete(self._rows, self._place(index), axis=0)

    def index(self, desc: tuple[Any, ...]) -> int:
        for place in np.flatnonzero((self._rows == np.array(desc[:3], np.uint64)).all(axis=1)):
            if self[int(place)] == tuple(desc):
                return int(place)
        raise nixlNotFoundError(f"no descriptor is {desc}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self._type == other._type and np.array_equal(self._rows, other._rows)

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> tuple[Any, ...]:
        return int(self._type), self._rows.tobytes()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._type = nixl_mem_t(state[0])
        self._rows = np.frombuffer(state[1], np.uint64).reshape(-1, 3)


class nixlXferDList(_DescriptorList):
    """Memory that a transfer names."""

    def _fill(self, descs: Any) -> None:
        self._take_rows(descs, 3)


class _DescriptorListWithWords(_DescriptorList):
    """Rows, and a word on each."""

    _words: list[Any]

    @staticmethod
    def _word(given: Any) -> Any:
        """Returns a word as it is kept; of rows that come without one it is that of ``""``."""
        raise NotImplementedError

    def _fill(self, descs: Any) -> None:
        has_words = isinstance(descs, list)
        self._take_rows(descs, 4 if has_words else 3)
        given = (desc[3] for desc in descs) if has_words else [""] * len(self._rows)
        self._words = [self._word(each) for each in given]

    def clear(self) -> None:
        super().clear()
        self._words = []

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*super().__getitem__(index), self._words[index])

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        super().__setitem__(index, desc)
        self._words[index] = self._word(desc[3])

    def append(self, desc: tuple[Any, ...]) -> None:
        super().append(desc)
        self._words.append(self._word(desc[3]))

    def remDesc(self, index: int) -> None:
        super().remDesc(index)
        del self._words[index]

    def index(self, desc: tuple[Any, ...]) -> int:
        return super().index((*desc[:3], self._word(desc[3])))

    def __eq__(self, other: object) -> bool:
        return (
            super().__eq__(other)
            and isinstance(other, _DescriptorListWithWords)
            and self._words == other._words
        )

    __hash__ = None

    def __getstate__(self) -> tuple[Any, ...]:
        return (*super().__getstate__(), self._words)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state)
        self._words = list(state[2])


class nixlRegDList(_DescriptorListWithWords):
    """Memory that is registered, and a word on each of it, which kvxfer keeps and does not read."""

    @staticmethod
    def _word(given: bytes | str) -> bytes:
        return _as_bytes(given)

    def trim(self) -> nixlXferDList:
        out = nixlXferDList(self._type)
        out._rows = self._rows
        return out


class nixlRemoteDList(_DescriptorListWithWords):
    """Memory of remote agents, for views from a GPU's kernels, of which kvxfer has none."""

    @staticmethod
    def _word(given: object) -> str:
        return str(given)


class nixlAgentConfig:
    """What an agent is made with; a door needs none of the threads, and telemetry costs it nothing."""

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
    """How a transfer went; times in microseconds."""

    def __init__(self) -> None:
        self.startTime = 0
        self.postDuration = 0
        self.xferDuration = 0
        self.totalBytes = 0
        self.descCount = 0


def _as_bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def _entries(indices: Any) -> NDArray[np.uint32]:
    array = np.asarray(indices)
    if array.ndim != 1 or (len(array) and (array.dtype.kind not in "iu" or array.min() < 0)):
        raise nixlInvalidParamError("indices are a list or a 1-D array of integers from 0 on")
    return np.ascontiguousarray(array, np.uint32)


def _options(config: nixlAgentConfig) -> tuple[AgentOptions, float]:
    """What the environment says, since NIXL's interface has no place for it (README.md)."""
    get = os.environ.get
    listen = get("KVXFER_NIXL_LISTEN", "tcp://127.0.0.1:0")
    if config.useListenThread:
        listen = f"{listen.rpartition(':')[0]}:{config.listenPort or DEFAULT_COMM_PORT}"
    options: dict[str, Any] = {"listen": listen}
    if advertise := get("KVXFER_NIXL_ADVERTISE"):
        options["advertise"] = advertise
    if transports := get("KVXFER_NIXL_TRANSPORTS"):
        options["transports"] = tuple(transports.split(","))
    if device := get("KVXFER_NIXL_DEVICE"):
        options["device"] = int(device)
    return AgentOptions(**options), float(get("KVXFER_NIXL_TIMEOUT_S", "120"))


class nixlAgent:
    """An agent behind NIXL's own names; handles of lists and transfers are its numbers."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        options, timeout_s = _options(config)
        self._name = name
        self._config = config
        self._door = _asked(lambda: Door(name, options, timeout_s))
        self._lock = threading.Lock()
        self._next = 1
        self._backends: dict[int, str] = {}
        # The agent that it is of; None: this, as the near end.
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
                f"there is no plug-in {plugin!r}: kvxfer goes by {' and '.join(BACKENDS)}"
            )
        return {}, ["DRAM_SEG", "VRAM_SEG"]

    def createBackend(self, backend: str, params: Mapping[str, str]) -> int:
        self.getPluginParams(backend)
        if backend in self._backends.values():
            raise nixlInvalidParamError(f"there is a backend {backend} already")
        number = self._number()
        self._backends[number] = backend
        return number

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        return self.getPluginParams(self._backends[backend])

    # ---- memory

    def _kind(self, type: nixl_mem_t) -> bool:
        """Returns whether memory of a kind is a GPU's."""
        if type > nixl_mem_t.VRAM_SEG:
            raise nixlNotSupportedError(f"kvxfer moves memory of the host and of GPUs, and no {type.name}")
        return type == nixl_mem_t.VRAM_SEG

    def registerMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        if descs.isEmpty():
            raise nixlBackendError("the list names no memory")
        is_gpu = self._kind(descs.getType())
        _asked(lambda: self._door.register(descs.rows, is_gpu=is_gpu))
        return nixl_status_t.NIXL_SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Sequence[int] = ()) -> nixl_status_t:
        is_gpu = self._kind(descs.getType())
        _asked(lambda: self._door.deregister(descs.rows, is_gpu=is_gpu))
        return nixl_status_t.NIXL_SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[dict[str, str] | None]:
        raise nixlNotSupportedError("memory of the host and of GPUs has nothing to be asked for")

    # ---- metadata

    def getLocalMD(self) -> bytes:
        return self._door.metadata()

    def getLocalPartialMD(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: Sequence[int] = ()
    ) -> bytes:
        is_gpu = self._kind(descs.getType())
        return _asked(
            lambda: self._door.metadata_of(descs.rows, is_gpu=is_gpu, with_address=bool(inc_conn_info))
        )

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        return _asked(lambda: self._door.add_remote(metadata)).encode()

    def invalidateRemoteMD(self, agent: str | bytes) -> nixl_status_t:
        try:
            _asked(lambda: self._door.remove_remote(_as_text(agent)))
        except nixlNotFoundError:
            return nixl_status_t.NIXL_ERR_NOT_FOUND
        return nixl_status_t.NIXL_SUCCESS

    def checkRemoteMD(self, agent: str | bytes, descs: nixlXferDList) -> nixl_status_t:
        is_gpu = not descs.isEmpty() and self._kind(descs.getType())
        known = self._door.has_remote(_as_text(agent), descs.rows, is_gpu=is_gpu)
        return nixl_status_t.NIXL_SUCCESS if known else nixl_status_t.NIXL_ERR_NOT_FOUND

    def makeConnection(self, agent: str | bytes, backends: Sequence[int] = ()) -> nixl_status_t:
        _asked(lambda: self._door.connect(_as_text(agent)))
        return nixl_status_t.NIXL_SUCCESS

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        if ip_addr:
            _asked(lambda: self._door.withdraw(_address(ip_addr, port)))
        else:
            self._door.invalidate()

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        _asked(lambda: self._door.tell(_address(ip_addr, port), self._door.metadata()))

    def sendLocalPartialMD(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[int] = (),
        ip_addr: str = "",
        port: int = 0,
        label: str = "",
    ) -> None:
        told = self.getLocalPartialMD(descs, inc_conn_info)
        _asked(lambda: self._door.tell(_address(ip_addr, port), told))

    def fetchRemoteMD(
        self, remote_agent: str | bytes, ip_addr: str = "", port: int = 0, label: str = ""
    ) -> None:
        _asked(lambda: self._door.ask(_address(ip_addr, port), _as_text(remote_agent)))

    # ---- lists

    def prepXferDlist(self, *args: Any, **kwargs: Any) -> int:
        """Of (agent, descs), (descs), or (agent, mem_type, N x 5 or N x 3 array), and backends behind."""
        named = list(args)
        if named and isinstance(named[0], _DescriptorList):
            named.insert(0, NIXL_INIT_AGENT)
        agent = _as_text(named[0] if named else kwargs.get("agent_name", NIXL_INIT_AGENT))
        descs = named[1] if len(named) > 1 else kwargs.get("descs")
        if isinstance(descs, nixl_mem_t):
            array, kind = (named[2] if len(named) > 2 else kwargs["descs"]), descs
            rows = _expanded(array) if array.ndim == 2 and array.shape[1] == 5 else _rows_of_array(array)
        elif isinstance(descs, nixlXferDList):
            rows, kind = descs.rows, descs.getType()
        else:
            raise TypeError("prepXferDlist takes a nixlXferDList, or a kind of memory and an N x 5 array")
        if not len(rows):
            raise nixlNotFoundError("the list is empty")
        return self._prepare(agent, rows, self._kind(kind))

    def _prepared(self, agent: str, rows: Rows, is_gpu: bool) -> Any:
        return _asked(lambda: self._door.prepare(agent, rows, is_gpu=is_gpu))

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
                "the near list is one of this agent's, the far one of a remote agent's"
            )
        chosen = _entries(local_indices), _entries(remote_indices)
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
        made = _asked(
            lambda: self._door.make(
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
        self._notify[number] = _as_bytes(notif_msg)
        return number

    def _request(self, handle: int) -> Request:
        request = self._requests.get(handle)
        if request is None:
            raise nixlInvalidParamError("the handle was released")
        return request

    def postXferReq(self, reqh: int, notif_msg: bytes | str = b"") -> nixl_status_t:
        request = self._request(reqh)
        if notif_msg:
            self._notify[reqh] = _as_bytes(notif_msg)
        done = _asked(lambda: request.post(self._notify[reqh]))
        return nixl_status_t.NIXL_SUCCESS if done else nixl_status_t.NIXL_IN_PROG

    def getXferStatus(self, reqh: int) -> nixl_status_t:
        request = self._request(reqh)
        if not request.times_ns[0]:
            raise nixlNotPostedError("the transfer was not posted")
        return nixl_status_t.NIXL_SUCCESS if _asked(request.is_done) else nixl_status_t.NIXL_IN_PROG

    def releaseXferReq(self, reqh: int) -> nixl_status_t:
        request = self._requests.pop(reqh, None)
        self._notify.pop(reqh, None)
        if request is not None:
            request.release()
        return nixl_status_t.NIXL_SUCCESS

    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:
        posted_ns, begun_ns, ended_ns = (request := self._request(reqh)).times_ns
        if not self._config.captureTelemetry or not posted_ns:
            raise nixlNoTelemetryError("the agent was made without capture_telemetry, or nothing was posted")
        out = nixlXferTelemetry()
        out.startTime = (time.time_ns() - time.monotonic_ns() + posted_ns) // 1000
        out.postDuration = max(0, begun_ns - posted_ns) // 1000
        out.xferDuration = max(0, (ended_ns or time.monotonic_ns()) - posted_ns) // 1000
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
        for agent, payload in self._door.take_notifications():
            out.setdefault(agent, []).append(payload)
        return out

    def genNotif(self, remote_agent: str | bytes, msg: bytes | str, backends: Any = ()) -> nixl_status_t:
        _asked(lambda: self._door.notify(_as_text(remote_agent), _as_bytes(msg)))
        return nixl_status_t.NIXL_SUCCESS

    # ---- a GPU's own transfers

    def prepMemView(self, *args: Any, **kwargs: Any) -> int:
        raise nixlNotSupportedError("a GPU's kernels reach remote memory by kvxfer.gpu, not by views")

    def releaseMemView(self, mvh: int) -> None:
        raise nixlNotSupportedError("there are no views of memory")


def _as_text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _address(ip_addr: str, port: int) -> str:
    if not ip_addr:
        raise nixlNotSupportedError(
            "kvxfer keeps metadata in no etcd yet: name the other agent's address and port, or send what "
            "get_agent_metadata() returns by your own way"
        )
    host = f"[{ip_addr}]" if ":" in ip_addr else ip_addr
    return f"tcp://{host}:{port or DEFAULT_COMM_PORT}"


def _rows_of_array(descs: NDArray[Any]) -> Rows:
    if descs.ndim != 2 or descs.shape[1] != 3 or descs.dtype not in (np.uint64, np.int64):
        raise ValueError("descs must be a Nx3 numpy array of uint64 or int64")
    return np.ascontiguousarray(descs).view(np.uint64)


def _expanded(strided: NDArray[Any]) -> Rows:
    """Rows of (address, length, device, stride, count) as rows of one block each."""
    if strided.ndim != 2 or strided.shape[1] != 5 or strided.dtype not in (np.uint64, np.int64):
        raise ValueError("strided descriptors are an Nx5 numpy array of uint64 or int64")
    counts = strided[:, 4].astype(np.int64)
    if not len(counts) or counts.min() < 1:
        raise nixlInvalidParamError("a strided descriptor has at least one block")
    of = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = strided[of, :3].astype(np.uint64)
    rows[:, 0] += strided[of, 3].astype(np.uint64) * within.astype(np.uint64)
    return rows


__all__ = [name for name in globals() if name.startswith(("nixl", "NIXL_"))] + [
    *nixl_mem_t.__members__,
    "DEFAULT_COMM_PORT",
    "HAVE_UCX_GPU_DEVICE_API",
]
