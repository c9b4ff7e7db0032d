"""``kvxfer bench cluster``: engines, router, daemons, etcd and Prometheus on three hosts."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx

from kvxfer.bench.cluster import hosts
from kvxfer.bench.cluster.compose import Compose
from kvxfer.bench.cluster.hosts import Network
from kvxfer.bench.engines import tiny_models
from kvxfer.bench.engines.options import ClusterOptions
from kvxfer.bench.engines.server_process import ProgramProcess, RouterServer
from kvxfer.bench.engines.vllm_server import VllmServer, complete, kvxfer_config
from kvxfer.bench.errors import BenchError
from kvxfer.bench.report.document import Words, print_parts

_HUB: Final = "control"
#: Which engine is beside which daemon, and what its connector is.
_ENGINES: Final = {"node-a": ("prefill", "kv_producer"), "node-b": ("decode", "kv_consumer")}
_SERVICES: Final = ("etcd", "prometheus")
_PORTS: Final = {"etcd": 2379, "prometheus": 9090, "engine": 8000, "router": 8080, "daemon": 7380}
_HEALTH: Final = {"etcd": "/health", "prometheus": "/-/ready"}
_UP_S: Final = 60.0
_MAX_TOKENS: Final = 16
_TEXT: Final = "Between two nodes lies one cable, and all pages of a prompt have to cross it. " * 5


def run(options: ClusterOptions) -> int:
    """Runs it; returns the status of the process."""
    if reason := hosts.missing():
        raise BenchError(f"no cluster here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="kvxfer-cluster-"))
    try:
        with ExitStack() as stack:
            cluster = _Cluster(stack, folder, options)
            wrong = cluster.ask(options.prompts)
            cluster.show()
            if not options.once and not wrong:
                _say("The cluster runs until Ctrl-C.")
                _wait_for_a_signal()
    except BenchError as error:
        _say(f"{error}\nlogs: {folder}")
        return 1
    if wrong:
        _say(f"{wrong} of {options.prompts} prompts failed; logs: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


class _Cluster:
    """All of it, up; `stack` ends it."""

    def __init__(self, stack: ExitStack, folder: Path, options: ClusterOptions) -> None:
        self._folder = folder
        self._stack = stack
        self._compose = Compose(folder)
        aliases = dict.fromkeys(_SERVICES, _HUB)
        self._network = stack.enter_context(Network([_HUB, *_ENGINES], aliases, options.mbit_s))
        # Of engines and the router, whose spans the daemon takes.
        token = f"kvx_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
        (folder / "spans-token").write_text(token)
        self._environment = {
            "KVXFER_SECRET_FILE": str(self._compose.secret("agents-secret")),
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"https://node-a:{_PORTS['daemon']}/v1/traces",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(self._compose.secret("tls-ca")),
            # Where it is set for this machine, the exporter trusts it instead.
            "REQUESTS_CA_BUNDLE": str(self._compose.secret("tls-ca")),
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {token}",
        }
        begun_s = time.monotonic()
        _say("starting etcd, two daemons, two engines, a router and Prometheus, about a minute ...")
        self._serve("etcd", [options.etcd, *self._compose.command("etcd")[1:]])
        daemons = [self._daemon(node) for node in _ENGINES]
        weights = tiny_models.save("llama", folder / "model")
        self.prefill, self.decode = (
            self._engine(node, weights, *engine) for node, engine in _ENGINES.items()
        )
        # Its configuration is made here: of what compose says, where it keeps its figures.
        kept = [word for word in self._compose.command("prometheus") if "config.file" not in word]
        config = f"--config.file={self._compose.prometheus()}"
        self._serve("prometheus", [options.prometheus, config, *kept])
        self.router = stack.enter_context(
            RouterServer(
                [self.prefill.url],
                [self.decode.url],
                folder / "router.log",
                within=self._inside(_HUB),
                at=(self._network.addresses[_HUB], _PORTS["router"]),
                environment=self._environment | {"OTEL_SERVICE_NAME": "router"},
            )
        )
        for name, daemon in zip(_ENGINES, daemons, strict=True):
            check = [sys.executable, "-m", *self._compose.check(name)]
            daemon.wait_until(lambda check=check: _succeeds(check), _UP_S)  # type: ignore[misc]
        for server in (self.prefill, self.decode, self.router):
            server.wait_ready()
        _say(f"up after {time.monotonic() - begun_s:.0f} s")

    def _inside(self, host: str) -> tuple[str, ...]:
        return self._network.hosts[host].inside

    def _serve(self, name: str, command: list[str]) -> None:
        """Starts a program of the first host, and waits until it answers."""
        if shutil.which(command[0]) is None:
            raise BenchError(f"{command[0]} is not installed: install {name}, or name the program (--{name})")
        command = [shutil.which(command[0]) or "", *command[1:]]
        process = self._stack.enter_context(
            ProgramProcess(name, [*self._inside(_HUB), *command], self._folder / f"{name}.log")
        )
        url = self._at(name) + _HEALTH[name]
        process.wait_until(lambda: _answers(url), _UP_S)

    def _at(self, service: str) -> str:
        return f"http://{self._network.addresses[_HUB]}:{_PORTS[service]}"

    def _daemon(self, node: str) -> ProgramProcess:
        spans = f"--token=transfer={self._folder / 'spans-token'}"
        command = [*self._inside(node), sys.executable, "-m", "kvxfer", *self._compose.command(node), spans]
        return self._stack.enter_context(
            ProgramProcess(f"the daemon of {node}", command, self._folder / f"{node}.log")
        )

    def _engine(self, node: str, weights: Path, role: str, kind: str) -> VllmServer:
        address = self._network.addresses[node]
        environment = self._environment | {
            "KVXFER_DAEMON_DIR": str(self._compose.kept(node, "/run/kvxfer")),
            "OTEL_SERVICE_NAME": role,
            "VLLM_HOST_IP": address,
        }
        return self._stack.enter_context(
            VllmServer(
                role,
                weights,
                self._folder / f"{role}.log",
                kv_transfer_config=kvxfer_config(kind, host=address) | {"engine_id": role},
                arguments=("--otlp-traces-endpoint", environment["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]),
                environment=environment,
                within=self._inside(node),
                at=(address, _PORTS["engine"]),
            )
        )

    def ask(self, num_prompts: int) -> int:
        """Sends prompts through the router; returns how many got other tokens than prefill alone gives."""
        wrong = 0
        for number in range(num_prompts):
            prompt = f"Prompt {number}. {_TEXT}"[: 100 + 80 * number]
            moved = self.decode.prompt_tokens("external_kv_transfer")
            told = complete(self.router, prompt, _MAX_TOKENS, request_id=_request(number))
            moved = self.decode.prompt_tokens("external_kv_transfer") - moved
            is_right = moved > 0 and told.token_ids == complete(self.prefill, prompt, _MAX_TOKENS).token_ids
            wrong += not is_right
            verdict = "the tokens of one engine" if is_right else "WRONG"
            _say(f"{_request(number)}: {len(prompt)} tokens, {moved} of them crossed the cable: {verdict}")
        return wrong

    def show(self) -> None:
        """Shows one request's way, what Prometheus knows, and where everything is."""
        sockets = [self._compose.kept(node, "/run/kvxfer") / "api.sock" for node in _ENGINES]
        command = [sys.executable, "-m", "kvxfer", "trace", _request(0)]
        command += [word for socket in sockets for word in ("--daemon", f"unix:{socket}")]
        _say(f"\n$ kvxfer {' '.join(command[3:])}")
        print(self._traced(command), flush=True)
        for query in ("count(kvxfer_daemon_ready == 1)", 'sum(kvxfer_transfers_ended_total{outcome="done"})'):
            _say(f"Prometheus has {query} = {self._value(query)}")
        pages = [f"https://{self._network.addresses[node]}:{_PORTS['daemon']}" for node in _ENGINES]
        for name, place in (
            ("router", f"{self.router.url}/v1/completions"),
            ("Prometheus", self._at("prometheus")),
            ("daemons' pages", ", ".join(pages)),
            ("a shell on node-a", f"{' '.join(self._inside('node-a')[:6])} bash"),
            ("logs", str(self._folder)),
        ):
            _say(f"{name}: {place}")

    def _traced(self, command: list[str]) -> str:
        """Returns the command's table once spans of router and both engines have come."""
        give_up_s = time.monotonic() + _UP_S
        while True:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_UP_S)
            told = done.stdout
            if "router" in told and "pages move" in told and told.count("llm_request") == len(_ENGINES):
                return told
            if time.monotonic() > give_up_s:
                raise BenchError(f"not all spans of the request arrived: {told or done.stderr}")
            time.sleep(0.5)

    def _value(self, query: str) -> str:
        """Returns what Prometheus answers, once it does."""
        give_up_s = time.monotonic() + _UP_S
        while time.monotonic() < give_up_s:
            answer = httpx.get(f"{self._at('prometheus')}/api/v1/query", params={"query": query}).json()
            if found := answer["data"]["result"]:
                return str(found[0]["value"][1])
            time.sleep(0.5)
        raise BenchError(f"Prometheus has no value of {query}: {json.dumps(answer)}")


def _request(number: int) -> str:
    return f"cluster-{number}"


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False, timeout=_UP_S).returncode == 0


def _wait_for_a_signal() -> None:
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        while not told.wait(1):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(words: str) -> None:
    print_parts([Words(words)])
