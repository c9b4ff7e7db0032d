"""One system's engines and router. They are paused while another system is measured."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx
import psutil

from kvxfer.bench.engines.server_process import EngineServer, RouterServer, ServerProcess, reserved_port
from kvxfer.bench.engines.sglang_server import SglangRouter, SglangServer
from kvxfer.bench.engines.vllm_server import TOKENS_PER_BLOCK, VllmServer
from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import noise
from kvxfer.bench.serving import sglang_observer
from kvxfer.bench.serving.events import FOLDER_VARIABLE, Observations
from kvxfer.bench.serving.systems import SGLANG, System

# Above NIXL's lease of 30 s; then prefill frees blocks that decode did not fetch.
_SETTLE_TIMEOUT_S: Final = 60.0
_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Deployment:
    """The processes of one system. ``folder`` has their logs and observers' files. ``with`` ends them."""

    def __init__(
        self, system: System, model: Path, folder: Path, num_blocks: int, arguments: tuple[str, ...]
    ) -> None:
        self.system = system
        self.engines: dict[str, EngineServer] = {}
        self.observations = Observations(folder / "seen")
        self._stack = ExitStack()
        self._router: ServerProcess | None = None
        self._is_paused = False
        folder.mkdir(parents=True)
        try:
            for role in _ROLES if system.is_pair else ("alone",):
                seen = folder / "seen" / role
                seen.mkdir(parents=True)
                environment = {**system.variables(), **self._port(), FOLDER_VARIABLE: str(seen)}
                self.engines[role] = self._stack.enter_context(
                    self._make_engine(role, model, folder / f"{role}.log", num_blocks, arguments, environment)
                )
            if system.is_pair:
                self._router = self._stack.enter_context(self._make_router(folder / "router.log"))
        except BaseException:
            self._stack.close()
            raise

    def _make_engine(
        self,
        role: str,
        model: Path,
        log: Path,
        num_blocks: int,
        arguments: tuple[str, ...],
        environment: Mapping[str, str],
    ) -> EngineServer:
        system = self.system
        name = f"{system.name}'s {role} engine" if system.is_pair else "the engine alone"
        if system.engine == SGLANG:
            return SglangServer(
                name,
                model,
                log,
                role=role if system.is_pair else "",
                backend=system.backend,
                num_tokens=num_blocks * TOKENS_PER_BLOCK,
                functions={**system.plugins, sglang_observer.NAME: sglang_observer.ENTRY_POINT},
                arguments=arguments,
                environment=environment,
            )
        return VllmServer(
            name,
            model,
            log,
            kv_transfer_config=system.kv_transfer_config(_ROLES.get(role, "")),
            num_blocks=num_blocks,
            arguments=arguments,
            environment=environment,
        )

    def _make_router(self, log: Path) -> ServerProcess:
        prefill, decode = self.engines["prefill"], self.engines["decode"]
        if isinstance(prefill, SglangServer) and isinstance(decode, SglangServer):
            return SglangRouter([prefill], [decode], log)
        return RouterServer([prefill.url], [decode.url], log, self.system.dispatch)

    def _port(self) -> dict[str, str]:
        name = self.system.port_variable
        if not name:
            return {}
        return {name: str(self._stack.enter_context(reserved_port()).getsockname()[1])}

    @property
    def _servers(self) -> list[ServerProcess]:
        return [*self.engines.values(), *([] if self._router is None else [self._router])]

    @property
    def url(self) -> str:
        """The URL that clients ask."""
        return self._servers[-1].url

    def processor_s(self) -> float:
        """Returns the processor time that the engines' processes have used so far."""
        engines = [psutil.Process(engine.pid) for engine in self.engines.values()]
        return noise.processor_s(one for root in engines for one in (root, *root.children(recursive=True)))

    def wait_ready(self) -> None:
        """Waits until all processes answer."""
        for server in self._servers:
            server.wait_ready()

    def pause(self) -> None:
        """Pauses all processes. They keep their memory and use no processor."""
        if not self._is_paused:
            self._signal(signal.SIGSTOP)
            self._is_paused = True

    def resume(self) -> None:
        """Lets the paused processes go on."""
        if self._is_paused:
            self._signal(signal.SIGCONT)
            self._is_paused = False

    def _signal(self, number: int) -> None:
        for server in self._servers:
            if not server.has_ended():
                server.signal(number)

    def settle(self) -> None:
        """Waits until no engine works or keeps blocks for another."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        for engine in self.engines.values():
            while self._is_busy(engine):
                if time.monotonic() > deadline:
                    raise BenchError(
                        f"{engine.name} still holds blocks {_SETTLE_TIMEOUT_S:g} s after its last request; "
                        f"{engine.last_words()}"
                    )
                time.sleep(0.1)

    def _is_busy(self, engine: EngineServer) -> bool:
        try:
            return engine.is_busy()
        except httpx.HTTPError as error:
            words = self.ending() or f"{type(error).__name__}: {error}"
            raise BenchError(f"{engine.name} does not say how busy it is; {words}") from error

    def ending(self) -> str:
        """Returns the last output of a process that has ended by itself; empty if all are up."""
        for server in self._servers:
            if server.has_ended():
                return f"{server.name} ended; {server.last_words()}"
        return ""

    def close(self) -> None:
        """Ends all processes."""
        self._stack.close()

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
