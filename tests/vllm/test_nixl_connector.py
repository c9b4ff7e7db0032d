"""vLLM's own NixlConnector, unchanged: on kvxfer's facade as ``nixl``, and on NIXL's agent over the plug-in.

Tokens are those of one engine.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.bench.engines.vllm_server import Completion, VllmServer, complete
from kvxfer.connectors.nixl import plugin_folder
from tests.etcd_server import free_ports
from tests.vllm import tiny_models
from tests.vllm.engine import ROOT, TO_PREFILL
from tests.waiting import until

TEXT = "Pages that one engine computed are read by another, by addresses and no layout. " * 6


@dataclass
class NixlPair:
    """A prefill and a decode engine."""

    folder: Path
    stack: ExitStack
    over_plugin: bool
    servers: dict[str, VllmServer] = field(default_factory=dict)

    def start(self, name: str) -> VllmServer:
        """Starts an engine, possibly with the name of one that has ended."""
        config: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
        }
        environment = {"PYTHONPATH": str(ROOT), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0])}
        if self.over_plugin:
            config["kv_connector_extra_config"] = {"backends": ["KVXFER"]}
            environment["NIXL_PLUGIN_DIR"] = str(plugin_folder())
        else:
            environment["PYTHONPATH"] += f":{ROOT / 'connectors/nixl/distribution'}"
        weights = tiny_models.save("llama", self.folder / "model")
        log = self.folder / f"{name}-{len(self.servers)}.log"
        server = VllmServer(name, weights, log, kv_transfer_config=config, environment=environment)
        self.servers[name] = self.stack.enter_context(server)
        return server

    def prefilled(self, prompt: str) -> dict[str, Any]:
        """Returns what prefill hands to decode."""
        answer = complete(self.servers["prefill"], prompt, max_tokens=1, kv_transfer_params=TO_PREFILL)
        assert answer.kv_transfer_params
        return answer.kv_transfer_params

    def decoded(self, prompt: str, params: dict[str, Any] | None = None) -> Completion:
        """Returns decode's answer, from prefill's handover or computed by decode itself."""
        return complete(self.servers["decode"], prompt, kv_transfer_params=params)

    def moved(self) -> int:
        """Returns how many prompt tokens decode received."""
        return self.servers["decode"].prompt_tokens("external_kv_transfer")


@pytest.fixture(scope="module", params=["facade", "plug-in"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NixlPair]:
    if request.param == "plug-in" and importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed beside vLLM: `make bench-serving-setup` installs it")
    with ExitStack() as stack:
        made = NixlPair(tmp_path_factory.mktemp("nixl"), stack, request.param == "plug-in")
        for name in ("prefill", "decode"):
            made.start(name)
        for server in made.servers.values():
            server.wait_ready()
        yield made


def test_tokens_are_those_of_one_engine(pair: NixlPair) -> None:
    for number in range(6):
        prompt = f"{number} {TEXT}"[: 70 + 60 * number]
        moved = pair.moved()
        answer = pair.decoded(prompt, pair.prefilled(prompt))
        assert pair.moved() > moved, "decode computed the prompt by itself"
        assert answer.token_ids == complete(pair.servers["prefill"], prompt).token_ids


def test_a_prefill_that_is_killed_costs_its_own_requests_alone(pair: NixlPair) -> None:
    prompts = [f"{name} {TEXT}"[:300] for name in ("kept", "lost", "after")]
    expected = [complete(pair.servers["prefill"], prompt).token_ids for prompt in prompts]
    assert pair.decoded(prompts[0], pair.prefilled(prompts[0])).token_ids == expected[0]
    params = pair.prefilled(prompts[1])
    pair.servers["prefill"].signal(signal.SIGKILL)
    moved = pair.moved()
    assert pair.decoded(prompts[1], params).token_ids == expected[1]
    assert pair.moved() == moved
    # The same model in another process: another agent, whose pages are read like those of the first.
    pair.start("prefill").wait_ready()
    assert pair.decoded(prompts[2], pair.prefilled(prompts[2])).token_ids == expected[2]
    assert pair.moved() > moved


def test_metadata_go_by_a_store_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import TCPStore

    from kvxfer.connectors.nixl import nixl_agent, nixl_agent_config

    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", f"127.0.0.1:{store.port}")
    one, other = (nixl_agent(name, nixl_agent_config()) for name in ("one", "other"))
    memory = np.zeros(4096, np.uint8)
    registered = other.register_memory([(memory.ctypes.data, 4096, 0, "")], "DRAM")
    one.agent._fetch_s = 60.0  # on a machine of any speed
    one.fetch_remote_metadata("other")
    other.send_local_metadata()
    until(lambda: one.check_remote_metadata("other", registered.trim()), "the other's metadata")
    other.invalidate_local_metadata()
    assert not store.check(["nixl/other/metadata"])
    one.remove_remote_agent("other")
    assert not one.check_remote_metadata("other")
    for agent in (one, other):
        agent.agent.close()
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", "nowhere")
    with pytest.raises(Exception, match="HOST:PORT"):
        nixl_agent("third", nixl_agent_config()).send_local_metadata()
