"""What `kvxfer bench serving` compares: ways to serve a model, by one engine or by prefill and decode."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvxfer.bench.compare.baseline import tree
from kvxfer.bench.engines.options import ENGINES
from kvxfer.bench.errors import BenchError
from kvxfer.bench.serving import sglang_host_memory, stages

#: Installs what any of them needs.
SETUP: Final = "make bench-serving-setup"
OURS: Final = "kvxfer-pull"
ALONE: Final = "alone"
VLLM, SGLANG = ENGINES
#: Engine -> the system that its other systems are compared with.
OURS_OF: Final = {VLLM: OURS, SGLANG: "kvxfer"}

_OBSERVER: Final = "kvxfer.bench.serving.observer"
# Shared memory for messages, cross-memory attach for pages. By default UCX sends messages over tcp.
_UCX: Final = {"UCX_TLS": "posix,sysv,cma,self,tcp"}
# Engines of other systems are paused meanwhile; their silence must not count as death.
_SILENT_TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve. ``name`` stands in tables and in JSON.

    ``connector``: vLLM's ``--kv-transfer-config`` of both engines, without the role. ``backend``: SGLang's
    transfer backend. Without either, one engine serves alone. ``needs``: modules that their environment must
    have. ``folder``: where more of it lies; engines get it in the variable ``folder_variable``.
    ``port_variable``: a variable that gives each engine a port of its own. ``plugins``: SGLang's, by name.
    """

    name: str
    words: str
    connector: Mapping[str, Any] | None = None
    dispatch: str = "sequential"
    needs: tuple[str, ...] = ()
    folder: Callable[[], Path] | None = None
    folder_variable: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    port_variable: str = ""
    engine: str = VLLM
    backend: str = ""
    plugins: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_pair(self) -> bool:
        """Whether a prefill and a decode engine serve, behind a router."""
        return self.connector is not None or bool(self.backend)

    @property
    def course(self) -> stages.Course:
        """The way of a request through its engines."""
        return stages.SGLANG if self.engine == SGLANG else stages.VLLM

    def kv_transfer_config(self, role: str) -> dict[str, Any] | None:
        """Returns the value of ``--kv-transfer-config``; ``role`` is ``kv_producer`` or ``kv_consumer``."""
        return None if self.connector is None else {**self.connector, "kv_role": role}

    def missing(self) -> str:
        """Returns why it cannot run in this environment; empty if it can."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        name = _WORDS[self.engine]
        if absent:
            return f"{', '.join(absent)} is not installed in {name}'s environment: `{SETUP}` installs it"
        try:
            self.variables()
        except FileNotFoundError as error:
            return str(error)
        return ""

    def variables(self) -> dict[str, str]:
        """Returns variables for the engines' environment; FileNotFoundError if `missing` gives a reason."""
        folder = {} if self.folder is None else {self.folder_variable: str(self.folder())}
        return {**self.environment, **folder}

    def settings(self) -> dict[str, Any]:
        """Returns the settings, for the result."""
        if self.backend:
            return {"backend": self.backend, **self.environment}
        if self.connector is None:
            return {}
        return {
            "connector": self.connector["kv_connector"],
            **self.connector.get("kv_connector_extra_config", {}),
            **self.environment,
            "dispatch": self.dispatch,
        }


_WORDS: Final = {VLLM: "vLLM", SGLANG: "SGLang"}


def _kvxfer() -> dict[str, Any]:
    return {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": _OBSERVER,
        "kv_connector_extra_config": {"silent_timeout_s": _SILENT_TIMEOUT_S},
    }


def _as_nixl() -> Path:
    folder = tree() / "connectors" / "nixl" / "distribution"
    if not folder.exists():
        raise FileNotFoundError(f"there is no {folder}: run this in a clone of kvxfer")
    return folder


def _plugins() -> Path:
    from kvxfer.connectors.nixl import plugin_folder

    return plugin_folder()


#: What ``import nixl`` loads: NIXL itself, kvxfer in its place, or NIXL over kvxfer's plug-in.
_ITSELF: Final = {"needs": ("nixl",), "environment": _UCX}
_FACADE: Final = {"folder": _as_nixl, "folder_variable": "PYTHONPATH"}
_PLUGIN: Final = {"needs": ("nixl",), "folder": _plugins, "folder_variable": "NIXL_PLUGIN_DIR"}


def _nixl(name: str, words: str, *, system: Mapping[str, Any] = _ITSELF, **extra: Any) -> System:
    connector = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "kvxfer.bench.serving.nixl",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": extra,
    }
    return System(name, words, connector, port_variable="VLLM_NIXL_SIDE_CHANNEL_PORT", **system)


def _sglang_nixl(name: str, words: str, *, system: Mapping[str, Any] = _ITSELF) -> System:
    plugins = {sglang_host_memory.NAME: sglang_host_memory.ENTRY_POINT}
    return System(name, words, engine=SGLANG, backend="nixl", plugins=plugins, **system)


_KNOWN: Final = (
    System(ALONE, "one engine does both, without a router"),
    System(OURS, "KvxferConnector: decode reads after prefill has ended", _kvxfer()),
    System(
        "kvxfer-push",
        "KvxferConnector: both engines are asked at once, prefill writes layers as it computes them",
        _kvxfer(),
        dispatch="concurrent",
    ),
    _nixl(
        "nixl",
        "NixlConnector without its progress thread and thread pool: the engine's own calls make progress",
        progress_thread=False,
        num_threads=0,
    ),
    _nixl(
        "nixl+thread",
        "NixlConnector with its defaults: a progress thread and a pool of 4 threads in each engine",
    ),
    _nixl("nixl-facade", "NixlConnector with its defaults, on kvxfer in NIXL's place", system=_FACADE),
    _nixl(
        "nixl-plugin",
        "NixlConnector with its defaults, on NIXL's agent with kvxfer's plug-in",
        system=_PLUGIN,
        backends=["KVXFER"],
    ),
    System(ALONE, "one engine does both, without a router", engine=SGLANG),
    System(
        OURS_OF[SGLANG],
        "kvxfer's transfer backend: prefill writes chunks as they are computed",
        environment={"KVXFER_SGLANG": json.dumps({"silent_timeout_s": _SILENT_TIMEOUT_S})},
        engine=SGLANG,
        backend="kvxfer",
    ),
    _sglang_nixl("nixl", "SGLang's own NIXL backend"),
    _sglang_nixl("nixl-facade", "the same on kvxfer in NIXL's place", system=_FACADE),
    _sglang_nixl(
        "nixl-plugin",
        "the same on NIXL's agent with kvxfer's plug-in",
        system={**_PLUGIN, "environment": {"SGLANG_DISAGGREGATION_NIXL_BACKEND": "KVXFER"}},
    ),
    System(
        "mooncake",
        "SGLang's own Mooncake backend, over TCP, its only way without RDMA",
        needs=("mooncake",),
        engine=SGLANG,
        backend="mooncake_tcp",
        plugins={sglang_host_memory.NAME: sglang_host_memory.ENTRY_POINT},
    ),
)
NAMES: Final = tuple(dict.fromkeys(system.name for system in _KNOWN))
#: Systems in which decode is asked after prefill has ended.
PULLS: Final = tuple(s.name for s in _KNOWN if s.connector is not None and s.dispatch == "sequential")


def names_of(engine: str) -> tuple[str, ...]:
    """Returns the systems that an engine is measured with, in the order of tables."""
    return tuple(system.name for system in _KNOWN if system.engine == engine)


def chosen(
    names: tuple[str, ...], known: tuple[System, ...] = _KNOWN, engine: str = VLLM
) -> tuple[System, ...]:
    """Returns the systems of ``--systems``, of one engine, in the order of tables."""
    return tuple(system for system in known if system.name in names and system.engine == engine)


def enter_environment(options: object) -> None:
    """Makes sure that the engine can be imported. If not, starts this command again in its environment.

    Does not return in that case. Raises if there is no such environment.
    """
    engine = getattr(options, "engine", VLLM)
    if importlib.util.find_spec(engine) is not None:
        return
    python = tree() / f".{engine}" / "bin" / "python"
    if not python.exists():
        raise BenchError(
            f"{sys.executable} has no {_WORDS[engine]}, and there is no {python}: `{SETUP}` in a clone of "
            f"kvxfer sets up .{engine} for the CPU, with NIXL (3.5 GB with .vllm); run this there"
        )
    # Without PYTHONPATH and the like, it uses the packages of its own environment.
    os.execv(python, [str(python), "-P", "-m", "kvxfer.bench", *_own_arguments()])


def _own_arguments() -> list[str]:
    """Returns the arguments after ``kvxfer bench`` on the command line."""
    arguments = sys.argv[1:]
    return arguments[1:] if arguments[:1] == ["bench"] else arguments
