"""Metadata by name in a real etcd: agents that withdraw, die and return, and an etcd that is away."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.connectors.nixl import _bindings, nixl_agent, nixl_agent_config
from kvxfer.connectors.nixl.metadata_store import WHOLE
from tests.etcd_server import Cluster, Member
from tests.waiting import until

ROOT = Path(__file__).parents[2]
NBYTES = 1 << 16
BOUND_S = 60.0

SENDER = """
import time
import numpy as np
from kvxfer.connectors.nixl import nixl_agent, nixl_agent_config
agent = nixl_agent("child", nixl_agent_config())
memory = np.full(1 << 16, 7, np.uint8)
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
agent.send_local_metadata()
print(memory.ctypes.data, flush=True)
time.sleep(600)
"""


class End:
    """An agent with two pieces of memory, registered each by itself."""

    def __init__(self, name: str) -> None:
        self.agent = nixl_agent(name, nixl_agent_config())
        self.memory = [np.full(NBYTES, len(name), np.uint8) for _ in range(2)]
        self.registered = [
            self.agent.register_memory([(each.ctypes.data, NBYTES, 0, "")], "DRAM") for each in self.memory
        ]

    def piece(self, number: int) -> Any:
        return self.registered[number].trim()

    def knows(self, name: str, descs: Any = None) -> bool:
        return self.agent.check_remote_metadata(name, descs)

    def read(self, far: Any, name: str) -> str:
        handle = self.agent.initialize_xfer("READ", self.piece(0), far, name)
        state = self.agent.transfer(handle)
        until = time.monotonic() + BOUND_S
        while state == "PROC" and time.monotonic() < until:
            state = self.agent.check_xfer_state(handle)
        return state


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Member]:
    with Cluster() as cluster:
        monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", f"http://{cluster.members[0].at}")
        yield cluster.members[0]


@pytest.fixture
def end(etcd: Member) -> Iterator[Callable[[str], End]]:
    made: list[End] = []

    def make(name: str) -> End:
        made.append(End(name))
        made[-1].agent.agent._fetch_s = BOUND_S  # on a machine of any speed
        return made[-1]

    yield make
    for each in made:
        each.agent.agent.close()


@pytest.fixture
def child(etcd: Member) -> Iterator[Callable[[], tuple[subprocess.Popen[str], int]]]:
    children: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], int]:
        children.append(
            subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        )
        out = children[-1].stdout
        assert out is not None
        return children[-1], int(out.readline())

    yield start
    for each in children:
        each.kill()
        each.communicate()


def test_it_is_fetched_once_it_is_there_and_followed(end: Callable[[str], End]) -> None:
    one, other = end("one"), end("other")
    one.agent.fetch_remote_metadata("other")
    # It learns nothing before there is something.
    time.sleep(0.2)
    assert not one.knows("other")
    other.agent.send_local_metadata()
    until(lambda: one.knows("other"))
    assert one.read(other.piece(1), "other") == "DONE"
    assert (one.memory[0] == len("other")).all()
    # Metadata that are sent again are added without another fetch.
    more = np.zeros(NBYTES, np.uint8)
    registered = other.agent.register_memory([(more.ctypes.data, NBYTES, 0, "")], "DRAM")
    assert not one.knows("other", registered.trim())
    other.agent.send_local_metadata()
    until(lambda: one.knows("other", registered.trim()))
    other.agent.invalidate_local_metadata()
    until(lambda: not one.knows("other"))
    with pytest.raises(_bindings.nixlNotFoundError):
        one.read(other.piece(1), "other")
    other.agent.send_local_metadata()
    until(lambda: one.knows("other"))


def test_a_label_that_never_comes_ends_no_other(
    end: Callable[[str], End], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = end("one"), end("other")
    other.agent.send_local_metadata()
    one.agent.fetch_remote_metadata("other")
    until(lambda: one.knows("other"))
    with caplog.at_level(logging.WARNING, "kvxfer"):
        one.agent.agent._stored()._wait_s = 0.3
        one.agent.fetch_remote_metadata("other", label="never")
        until(lambda: "has no never of agent other" in caplog.text)
    # Each fetch begins to follow anew: a withdrawal in between is not missed.
    with ThreadPoolExecutor(1) as others:
        withdrawn = others.submit(other.agent.invalidate_local_metadata)
        while not withdrawn.done():
            one.agent.fetch_remote_metadata("other", label="never")
            time.sleep(0.001)
        withdrawn.result()
    with caplog.at_level(logging.WARNING, "kvxfer"):
        caplog.clear()
        one.agent.fetch_remote_metadata("other", label="never")
        until(lambda: not one.knows("other"))
        until(lambda: "has no never of agent other" in caplog.text)
    other.agent.send_local_metadata()
    until(lambda: one.knows("other"))


def test_metadata_that_are_no_text_end_no_follower(
    end: Callable[[str], End], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = end("one"), end("other")
    told = other.agent.get_agent_metadata()
    with caplog.at_level(logging.WARNING, "kvxfer"):
        other.agent.agent._stored().send(WHOLE, told.replace(b"other", b"oth\xffr"))
        one.agent.fetch_remote_metadata("other")
        until(lambda: "metadata of other in etcd" in caplog.text)
    other.agent.send_local_metadata()
    until(lambda: one.knows("other"))


def test_parts_go_under_labels(end: Callable[[str], End]) -> None:
    one, other = end("one"), end("other")
    with pytest.raises(_bindings.nixlInvalidParamError, match="label"):
        other.agent.send_partial_agent_metadata(other.registered[0], True)
    for number in range(2):
        other.agent.send_partial_agent_metadata(other.registered[number], True, label=f"piece-{number}")
    one.agent.fetch_remote_metadata("other", label="piece-0")
    until(lambda: one.knows("other", other.piece(0)))
    assert not one.knows("other", other.piece(1))
    one.agent.fetch_remote_metadata("other", label="piece-1")
    until(lambda: one.knows("other", other.piece(1)))
    assert one.knows("other", other.piece(0))
    one.agent.remove_remote_agent("other")
    # It learns nothing anew.
    time.sleep(0.2)
    assert not one.knows("other")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_that_dies_is_forgotten_and_comes_back(
    end: Callable[[str], End], child: Callable[[], tuple[subprocess.Popen[str], int]], how: signal.Signals
) -> None:
    one = end("one")
    for _ in range(2):
        process, address = child()
        one.agent.fetch_remote_metadata("child")
        until(lambda: one.knows("child"))
        far = one.agent.get_xfer_descs([(address, NBYTES, 0)], "DRAM")
        until(lambda far=far: one.knows("child", far))  # type: ignore[misc]
        assert one.read(far, "child") == "DONE"
        os.kill(process.pid, how)
        until(lambda: not one.knows("child"))


def test_etcd_that_is_away_harms_no_transfer(end: Callable[[str], End], etcd: Member) -> None:
    one, other = end("one"), end("other")
    other.agent.send_local_metadata()
    one.agent.fetch_remote_metadata("other")
    until(lambda: one.knows("other"))
    assert one.read(other.piece(0), "other") == "DONE"
    # etcd restarts empty: agents write their keys again, and no living agent is forgotten meanwhile.
    etcd.kill()
    with pytest.raises(_bindings.nixlRemoteDisconnectError, match="etcd does not answer"):
        one.agent.send_local_metadata()
    assert one.read(other.piece(0), "other") == "DONE"
    etcd.start(empty=True)
    etcd.until_healthy()
    late = end("late")
    late.agent.fetch_remote_metadata("other")
    until(lambda: late.knows("other"))
    assert one.read(other.piece(1), "other") == "DONE"
    assert one.knows("other")


def test_what_never_comes_is_said(
    end: Callable[[str], End], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = end("one")
    one.agent.agent._fetch_s = 0.2
    with caplog.at_level(logging.WARNING, "kvxfer"):
        one.agent.fetch_remote_metadata("nobody")
        until(lambda: "has no metadata of agent nobody" in caplog.text)
    monkeypatch.setenv("NIXL_TCPSTORE_ENDPOINT", "127.0.0.1:1")
    other = end("other")
    with pytest.raises(_bindings.nixlInvalidParamError, match="both are set"):
        other.agent.fetch_remote_metadata("one")
    monkeypatch.delenv("NIXL_TCPSTORE_ENDPOINT")
    monkeypatch.delenv("NIXL_ETCD_ENDPOINTS")
    with pytest.raises(_bindings.nixlInvalidParamError, match="neither is set"):
        other.agent.send_local_metadata()
    monkeypatch.setenv("NIXL_ETCD_ENDPOINTS", "127.0.0.1:2379")
    with pytest.raises(_bindings.nixlInvalidParamError, match="http://HOST:PORT"):
        other.agent.send_local_metadata()
