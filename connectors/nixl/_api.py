"""NIXL's Python interface (1.5.1), implemented by kvxfer: the same classes, calls and returns.

README.md has a table of the calls that are the same, stricter or missing.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.connectors.nixl import _bindings as bindings
from kvxfer.connectors.nixl.logging import get_logger

DEFAULT_COMM_PORT = bindings.DEFAULT_COMM_PORT

logger = get_logger(__name__.rpartition(".")[2])

nixl_backend_handle = int


class _Handle:
    """A handle: a number of the agent's, and whether it was released."""

    __slots__ = ("_agent", "_handle", "_released")

    def __init__(self, agent: bindings.nixlAgent, value: int) -> None:
        self._agent = agent
        self._handle = int(value)
        self._released = False

    def _give_back(self) -> Callable[[int], object]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(0x{self._handle:x}, released={self._released})"

    def release(self) -> None:
        """Releases the handle. Idempotent."""
        if not self._released:
            self._give_back()(self._handle)
            self._released = True

    def __del__(self) -> None:
        # While the interpreter shuts down, the functions that this calls may be gone.
        if not self._released and not sys.is_finalizing():
            self.release()


class nixl_prepped_dlist_handle(_Handle):
    """A prepared list of descriptors."""

    __slots__ = ()

    def _give_back(self) -> Callable[[int], object]:
        return self._agent.releasedDlistH


class nixl_xfer_handle(_Handle):
    """A transfer; releasing it ends the transfer, and no byte of it lands afterwards."""

    __slots__ = ()

    def _give_back(self) -> Callable[[int], object]:
        return self._agent.releaseXferReq


class nixl_thread_sync_t(Enum):
    """How the callers' threads share an agent."""

    NIXL_THREAD_SYNC_NONE = bindings.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = bindings.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = bindings.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = bindings.nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT


class nixl_agent_config:
    """The configuration of an agent.

    No option changes the agent's threads: an agent always makes progress by itself, and sleeps when idle.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t (got {type(sync_mode).__name__!r})")
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class nixl_agent:
    """An agent: registers memory, announces it to others, and moves bytes between their memory and its own.

    Parameters
    ----------
    agent_name
        Must differ among agents that know each other.
    nixl_conf
        The configuration; None for the defaults.
    instantiate_all
        Whether to create every backend; all of them are kvxfer.
    """

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        if nixl_conf and instantiate_all:
            instantiate_all = False
            logger.warning("instantiate_all is ignored, because the configuration names the backends")
        conf = nixl_conf or nixl_agent_config()
        sync_mode = conf.sync_mode or (
            nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            if conf.enable_listen
            else nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
        )
        config = bindings.nixlAgentConfig(
            useProgThread=conf.enable_pthread,
            useListenThread=conf.enable_listen,
            listenPort=conf.port,
            syncMode=sync_mode.value,
            captureTelemetry=conf.capture_telemetry,
        )
        self.name = agent_name
        self.agent = bindings.nixlAgent(agent_name, config)
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, nixl_backend_handle] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        self.plugin_list = self.agent.getAvailPlugins()
        for backend in self.plugin_list if instantiate_all else conf.backends:
            if backend in self.plugin_list:
                self.create_backend(backend, {})
            else:
                logger.warning("backend %s is not one of kvxfer's (%s)", backend, ", ".join(self.plugin_list))
        self.nixl_mems = {
            "DRAM": bindings.nixl_mem_t.DRAM_SEG,
            "VRAM": bindings.nixl_mem_t.VRAM_SEG,
            "FILE": bindings.nixl_mem_t.FILE_SEG,
            "BLOCK": bindings.nixl_mem_t.BLK_SEG,
            "OBJ": bindings.nixl_mem_t.OBJ_SEG,
            "cpu": bindings.nixl_mem_t.DRAM_SEG,
            "cuda": bindings.nixl_mem_t.VRAM_SEG,
        }
        self.nixl_ops = {
            "WRITE": bindings.nixl_xfer_op_t.NIXL_WRITE,
            "READ": bindings.nixl_xfer_op_t.NIXL_READ,
        }

    def _handles(self, backends: Sequence[str]) -> list[int]:
        return [self.backends[backend] for backend in backends]

    # ---- backends

    def get_plugin_list(self) -> list[str]:
        """Returns the backends that can be created."""
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """Returns the kinds of memory of a backend that can be created; empty if it cannot."""
        return self._plugin(backend)[1]

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Returns the parameters of a backend that can be created."""
        return self._plugin(backend)[0]

    def _plugin(self, backend: str) -> tuple[dict[str, str], list[str]]:
        if backend not in self.plugin_list:
            logger.warning("there is no plug-in %s", backend)
            return {}, []
        return self.agent.getPluginParams(backend)

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """Returns the kinds of memory of a created backend."""
        return self.backend_mems.get(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """Returns the parameters that a backend was created with."""
        return self.backend_options.get(backend, {})

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """Creates a backend."""
        handle = self.agent.createBackend(backend, initParams or {})
        self.backends[backend] = handle
        self.backend_options[backend], self.backend_mems[backend] = self.agent.getBackendParams(handle)

    # ---- memory

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> bindings.nixlRegDList:
        """Registers memory; returns its list, which `deregister_memory` takes."""
        descs = self._described(reg_list, mem_type)
        self.agent.registerMem(descs, self._handles(backends))
        return descs

    def _described(self, reg_list: Any, mem_type: str | None) -> bindings.nixlRegDList:
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is None:
            raise TypeError("memory must be a list of 4-tuples, an Nx3 array, a tensor, or a list of tensors")
        return descs

    def deregister_memory(self, dereg_list: bindings.nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Deregisters memory; when this returns, no byte from a peer can land there."""
        self.agent.deregisterMem(dereg_list, self._handles(backends))

    def query_memory(
        self, reg_list: Any, backend: str, mem_type: str | None = None
    ) -> list[dict[str, str] | None]:
        """Concerns files and objects, which kvxfer lacks; raises nixlNotSupportedError."""
        descs = self._described(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(f"there is no backend {backend!r}, only {list(self.backends)}")
        return self.agent.queryMem(descs, self.backends[backend])

    # ---- remote agents

    def make_connection(self, remote_agent: str, backends: Sequence[str] = ()) -> None:
        """Opens the session with a remote agent and waits for it; otherwise the first transfer opens it."""
        self.agent.makeConnection(remote_agent, self._handles(backends))

    def get_agent_metadata(self) -> bytes:
        """Returns metadata that let another agent use all memory that is registered now."""
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(
        self, descs: bindings.nixlRegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """Returns metadata of some memory; without connection info, for agents that know this one already."""
        return self.agent.getLocalPartialMD(descs, inc_conn_info, self._handles(backends))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Adds another agent's metadata; returns that agent's name, in bytes as NIXL does."""
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: str) -> None:
        """Forgets an agent and ends its session."""
        self.agent.invalidateRemoteMD(agent)

    def check_remote_metadata(self, agent: str, descs: bindings.nixlXferDList | None = None) -> bool:
        """Returns whether an agent's metadata are here and cover the descriptors."""
        if descs is None:
            descs = bindings.nixlXferDList(bindings.nixl_mem_t.DRAM_SEG)
        return self.agent.checkRemoteMD(agent, descs) == bindings.nixl_status_t.NIXL_SUCCESS

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Sends metadata to the agent that listens at an address; returns before that agent adds them."""
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(
        self,
        descs: bindings.nixlRegDList,
        inc_conn_info: bool = False,
        backends: Sequence[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """Sends metadata of some memory, in the same way as `send_local_metadata`."""
        self.agent.sendLocalPartialMD(descs, inc_conn_info, self._handles(backends), ip_addr, port, label)

    def fetch_remote_metadata(
        self, remote_agent: str, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Asks the agent at an address for its metadata; `check_remote_metadata` tells when they are here."""
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Ends the rights that metadata gave. With an address, the agent there also forgets this agent."""
        self.agent.invalidateLocalMD(ip_addr, port)

    # ---- transfers

    def prep_xfer_dlist(
        self, agent_name: str, xfer_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> nixl_prepped_dlist_handle:
        """Prepares a list of descriptors; transfers then name some of them by index.

        ``""`` and ``"NIXL_INIT_AGENT"`` mean this agent's memory as the near end. This agent's own name means
        its memory as the far end. The rows of an N x 5 array are (address, length, device, stride, count).
        """
        if agent_name == "NIXL_INIT_AGENT":
            agent_name = bindings.NIXL_INIT_AGENT
        handles = self._handles(backends)
        is_strided = isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5
        if is_strided and mem_type is None:
            raise ValueError("strided descriptors need a mem_type")
        if isinstance(xfer_list, np.ndarray) and mem_type is not None:
            number = self.agent.prepXferDlist(agent_name, self.nixl_mems[mem_type], xfer_list, handles)
        else:
            number = self.agent.prepXferDlist(agent_name, self.get_xfer_descs(xfer_list, mem_type), handles)
        return nixl_prepped_dlist_handle(self.agent, number)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: list[int] | NDArray[Any],
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: list[int] | NDArray[Any],
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """Makes a transfer of some descriptors of two prepared lists; `transfer` begins it."""
        number = self.agent.makeXferReq(
            self.nixl_ops[operation],
            local_xfer_side._handle,
            local_indices,
            remote_xfer_side._handle,
            remote_indices,
            notif_msg,
            self._handles(backends),
            skip_desc_merge,
        )
        return nixl_xfer_handle(self.agent, number)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: bindings.nixlXferDList,
        remote_descs: bindings.nixlXferDList,
        remote_agent: str,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """Prepares two lists and makes a transfer of all of them."""
        number = self.agent.createXferReq(
            self.nixl_ops[operation],
            local_descs,
            remote_descs,
            remote_agent,
            notif_msg,
            self._handles(backends),
        )
        return nixl_xfer_handle(self.agent, number)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        """Begins a transfer; returns "DONE" if it has already ended, else "PROC"."""
        return _state(self.agent.postXferReq(handle._handle, notif_msg))

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Returns "DONE" or "PROC". If the transfer failed, raises an error with the reason, as NIXL does."""
        return _state(self.agent.getXferStatus(handle._handle))

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> bindings.nixlXferTelemetry:
        """Returns a transfer's times, bytes and descriptors, if the agent was made with capture_telemetry."""
        return self.agent.getXferTelemetry(handle._handle)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Returns (0, 0, "UNKNOWN"), like NIXL's UCX backend: kvxfer makes no estimates."""
        duration, margin, _ = self.agent.estimateXferCost(req_handle._handle)
        return duration, margin, "UNKNOWN"

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """Returns the backend's name."""
        number = self.agent.queryXferBackend(handle._handle)
        return next(name for name, each in self.backends.items() if each == number)

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Ends a transfer; when this returns, no byte of it can land."""
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Releases a prepared list."""
        handle.release()

    def prep_mem_view(self, dlist: Any, *, backends: Sequence[str] | None = None) -> int:
        """Serves GPU kernels, which kvxfer does not support; raises nixlNotSupportedError."""
        return self.agent.prepMemView(dlist, self._handles(backends or ()))

    def release_mem_view(self, mvh: int) -> None:
        """Serves GPU kernels, which kvxfer does not support; raises nixlNotSupportedError."""
        self.agent.releaseMemView(mvh)

    # ---- notifications

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Returns the notifications since the last call, by the remote agents' names."""
        return self.agent.getNotifs({}, self._handles(backends))

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Adds new notifications to those not handled yet; returns all of them."""
        self.notifs = self.agent.getNotifs(self.notifs, self._handles(backends))
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Returns whether a notification begins with (or contains) a tag; removes the first such one."""
        told = self.update_notifs(backends).get(remote_agent_name, [])
        for place, message in enumerate(told):
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                del told[place]
                return True
        return False

    def send_notif(self, remote_agent_name: str, notif_msg: bytes | str, backend: str | None = None) -> None:
        """Sends a notification to a remote agent, without a transfer."""
        self.agent.genNotif(remote_agent_name, notif_msg, [] if backend is None else self._handles([backend]))

    # ---- lists of descriptors

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> bindings.nixlXferDList | None:
        """Makes a list from tuples (address, length, device), an N x 3 array, a tensor or several."""
        made: bindings.nixlXferDList | None = self._descs(descs, mem_type, bindings.nixlXferDList, 3)
        return made

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> bindings.nixlRegDList | None:
        """Makes a list for registration, like `get_xfer_descs`; each tuple ends with a text on its memory."""
        made: bindings.nixlRegDList | None = self._descs(descs, mem_type, bindings.nixlRegDList, 4)
        return made

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> bindings.nixlRemoteDList | None:
        """Makes a list from tuples (address, length, device, agent)."""
        made: bindings.nixlRemoteDList | None = self._descs(descs, mem_type, bindings.nixlRemoteDList, 4)
        return made

    def _descs(self, descs: Any, mem_type: str | None, kind: Any, width: int) -> Any:
        if isinstance(descs, kind):
            return descs
        if isinstance(descs, bindings.DescriptorList):
            logger.error("a %s is not a %s", type(descs).__name__, kind.__name__)
            return None
        if (tensors := _tensors(descs)) is not None:
            return self._of_tensors(tensors, kind) if kind is not bindings.nixlRemoteDList else None
        is_array = isinstance(descs, np.ndarray)
        if not is_array and not isinstance(descs[0], tuple):
            return None
        if mem_type is None:
            logger.error("descriptors that are not tensors need a mem_type")
            return None
        if descs.ndim != 2 or descs.shape[1] != 3 if is_array else len(descs[0]) != width:
            logger.error("a %s is made from %d-tuples or an Nx3 array", kind.__name__, width)
            return None
        return kind(self.nixl_mems[mem_type], descs)

    def _of_tensors(self, tensors: Sequence[Any], kind: Any) -> Any:
        if any(tensor.device != tensors[0].device for tensor in tensors):
            return None
        if not all(tensor.is_contiguous() for tensor in tensors):
            logger.error("tensors have to be contiguous")
            return None
        rows = np.array(
            [
                (tensor.data_ptr(), tensor.numel() * tensor.element_size(), max(tensor.get_device(), 0))
                for tensor in tensors
            ],
            np.uint64,
        )
        return kind(self.nixl_mems["DRAM" if tensors[0].get_device() == -1 else "VRAM"], rows)

    def get_serialized_descs(self, descs: Any) -> bytes:
        """Returns a list as bytes (by pickle, as NIXL's clients expect)."""
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """Returns the list in bytes from `get_serialized_descs`.

        Raises
        ------
        pickle.UnpicklingError
            The bytes are anything but a list of descriptors.
        """
        return _ListReader(serialized_descs).load()


class _ListReader(pickle.Unpickler):
    """Unpickles lists of descriptors, and refuses everything else that bytes may name."""

    def __init__(self, serialized: bytes) -> None:
        import io

        super().__init__(io.BytesIO(serialized))

    def find_class(self, module: str, name: str) -> Any:
        if module.rpartition(".")[2] == "descriptor_lists" and name in (
            "nixlXferDList",
            "nixlRegDList",
            "nixlRemoteDList",
        ):
            return getattr(bindings, name)
        if (module, name) == ("copyreg", "_reconstructor"):
            import copyreg

            return copyreg._reconstructor  # type: ignore[attr-defined]
        if (module, name) == ("builtins", "object"):
            return object
        raise pickle.UnpicklingError(f"{module}.{name} is not a list of descriptors")


def _tensors(descs: Any) -> Sequence[Any] | None:
    """Returns the torch tensors in an argument, or None. Does not import torch: tensors imply it was."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(descs, torch.Tensor):
        return [descs]
    if isinstance(descs, (list, tuple)) and descs and isinstance(descs[0], torch.Tensor):
        return descs
    return None


def _state(status: bindings.nixl_status_t) -> str:
    return {bindings.nixl_status_t.NIXL_SUCCESS: "DONE", bindings.nixl_status_t.NIXL_IN_PROG: "PROC"}.get(
        status, "ERR"
    )
