"""The facade alone: where it is stricter than NIXL, and how it ends."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.connectors.nixl import _bindings, nixl_agent, nixl_agent_config
from kvxfer.connectors.nixl.statuses import NixlError
from tests.waiting import until

ROOT = Path(__file__).parents[2]
NBYTES = 1 << 20
BOUND_S = 60.0


class End:
    """An agent with some registered memory."""

    def __init__(self, name: str, nbytes: int = NBYTES, **config: Any) -> None:
        self.agent = nixl_agent(name, nixl_agent_config(**config))
        self.memory = np.random.default_rng(len(name)).integers(0, 256, nbytes, np.uint8)
        self.registered = self.agent.register_memory([(self.address, nbytes, 0, "")], "DRAM")

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    def descs(self, *places: tuple[int, int]) -> Any:
        return self.agent.get_xfer_descs([(self.address + at, nbytes, 0) for at, nbytes in places], "DRAM")

    def knows(self, other: End) -> None:
        self.agent.add_remote_agent(other.agent.get_agent_metadata())

    def move(self, operation: str, near: Any, far: Any, remote: str, notify: bytes = b"") -> str:
        handle = self.agent.initialize_xfer(operation, near, far, remote, notify)
        state = self.agent.transfer(handle)
        until = time.monotonic() + BOUND_S
        while state == "PROC" and time.monotonic() < until:
            state = self.agent.check_xfer_state(handle)
        return state

    def move_until(self, near: Any, far: Any, remote: str) -> None:
        """Writes until that fails, for a bounded time."""
        until = time.monotonic() + BOUND_S
        while time.monotonic() < until:
            assert self.move("WRITE", near(), far, remote) == "DONE"


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    near, far = End("near"), End("far-away")
    near.knows(far)
    yield near, far
    for end in (near, far):
        end.agent.agent.close()


def test_both_ways(ends: tuple[End, End]) -> None:
    near, far = ends
    places = [(at * 4096, 4096) for at in range(0, 200, 3)]
    wanted = near.memory.copy()
    assert (
        near.move("WRITE", near.descs(*places), far.descs(*reversed(places)), "far-away", b"told") == "DONE"
    )
    for (at, nbytes), (to, _) in zip(places, reversed(places), strict=True):
        assert np.array_equal(far.memory[to : to + nbytes], wanted[at : at + nbytes])
    assert far.agent.check_remote_xfer_done("near", b"to")
    assert near.move("READ", near.descs((1, 777)), far.descs((5, 777)), "far-away") == "DONE"
    assert np.array_equal(near.memory[1:778], far.memory[5:782])


def test_nothing_lands_after_deregistration(ends: tuple[End, End]) -> None:
    near, far = ends
    descs = near.descs((0, NBYTES)), far.descs((0, NBYTES))
    assert near.move("WRITE", *descs, "far-away") == "DONE"
    stops, failed = threading.Event(), []
    states: list[str] = []

    def write_on() -> None:
        while not stops.is_set():
            try:
                states.append(near.move("WRITE", *descs, "far-away"))
            except NixlError as error:
                failed.append(error)
                return

    writer = threading.Thread(target=write_on)
    writer.start()
    until(lambda: len(states) >= 3, "writes")
    far.agent.deregister_memory(far.registered)
    far.memory[:] = 7
    near.memory[:] = 9
    writer.join(BOUND_S)
    stops.set()
    assert isinstance(failed[0], (_bindings.nixlNotFoundError, _bindings.nixlNotAllowedError))
    assert (far.memory == 7).all()


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_nothing_lands_after_release(
    monkeypatch: pytest.MonkeyPatch, transport: str, operation: str, seed: int
) -> None:
    monkeypatch.setenv("KVXFER_NIXL_TRANSPORTS", transport)
    near, far = End("near", 32 << 20), End("far-away", 32 << 20)
    near.knows(far)
    near.agent.make_connection("far-away")
    destination = far.memory if operation == "WRITE" else near.memory
    sides = near.descs((0, 32 << 20)), far.descs((0, 32 << 20))
    random = np.random.default_rng(seed)
    for _ in range(20):
        handle = near.agent.initialize_xfer(operation, *sides, "far-away")
        near.agent.transfer(handle)
        # The moment of the release.
        time.sleep(random.random() * 0.005)
        near.agent.release_xfer_handle(handle)
        destination[:] = 9
        # Nothing lands.
        time.sleep(0.02)
        assert (destination == 9).all()
        (near.memory if operation == "WRITE" else far.memory)[:] = 3
    for end in (near, far):
        end.agent.agent.close()


@pytest.mark.parametrize(
    "indices",
    [[2**32 + 5], np.array([2**32 + 5]), [16], [-1], range(2**62), range(0, -2, -1), [2**70], [0.5]],
)
def test_an_index_of_no_entry_is_refused(ends: tuple[End, End], indices: Any) -> None:
    near, far = ends
    before = far.memory.copy()
    places = [(at * 64, 64) for at in range(16)]
    lists = [
        near.agent.prep_xfer_dlist(of, end.descs(*places)) for of, end in (("", near), ("far-away", far))
    ]
    for chosen in ([indices, [0]], [[0], indices]):
        with pytest.raises(_bindings.nixlInvalidParamError):
            near.agent.transfer(
                near.agent.make_prepped_xfer("WRITE", lists[0], chosen[0], lists[1], chosen[1])
            )
    assert (far.memory == before).all()


def test_strided_rows_are_their_blocks(ends: tuple[End, End]) -> None:
    near, far = ends
    wanted = near.memory.copy()
    rows = [
        np.array([(end.address, 64, 0, 128, 3), (end.address + 4096, 64, 0, 64, 2)], np.int64) for end in ends
    ]
    lists = [
        near.agent.prep_xfer_dlist(of, each, "DRAM") for of, each in zip(("", "far-away"), rows, strict=True)
    ]
    handle = near.agent.make_prepped_xfer("WRITE", lists[0], list(range(5)), lists[1], [4, 3, 2, 1, 0])
    near.agent.transfer(handle)
    while near.agent.check_xfer_state(handle) == "PROC":
        pass
    offsets = [0, 128, 256, 4096, 4160]
    for at, to in zip(offsets, reversed(offsets), strict=True):
        assert (far.memory[to : to + 64] == wanted[at : at + 64]).all()


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ((0, 1, 0, 1, 2**31), _bindings.nixlNotFoundError),
        ((0, 1, 0, 1, 2**63 - 1), _bindings.nixlNotFoundError),
        ((0, 64, 0, 2**60, 17), _bindings.nixlNotFoundError),  # 16 x 2**60 is 0 in 64 bits
        ((0, 64, 0, 0, 2**40), _bindings.nixlInvalidParamError),
        ((0, 64, 0, 64, 0), _bindings.nixlInvalidParamError),
        ((0, 0, 0, 64, 2), _bindings.nixlInvalidParamError),
    ],
)
def test_a_strided_row_is_checked_before_it_is_expanded(
    ends: tuple[End, End], row: tuple[int, ...], error: type[NixlError]
) -> None:
    near, _ = ends
    with pytest.raises(error):
        near.agent.prep_xfer_dlist("", np.array([(near.address + row[0], *row[1:])], np.int64), "DRAM")


@pytest.mark.parametrize("name", ["name", "tcp://"])
def test_metadata_that_are_no_text_are_refused(ends: tuple[End, End], name: str) -> None:
    near, far = ends
    told = bytearray(far.agent.get_agent_metadata())
    told[told.index(b"far-away" if name == "name" else b"tcp://")] = 0xFF
    with pytest.raises(_bindings.nixlMismatchError):
        near.agent.add_remote_agent(bytes(told))
    for no_text in (b"\xff", "\udcff"):
        with pytest.raises(_bindings.nixlInvalidParamError, match="UTF-8"):
            near.agent.remove_remote_agent(no_text)  # type: ignore[arg-type]


def test_rights_end_with_the_metadata(ends: tuple[End, End]) -> None:
    near, far = ends
    descs = near.descs((0, 64)), far.descs((0, 64))
    assert near.move("READ", *descs, "far-away") == "DONE"
    with pytest.raises(_bindings.nixlInvalidParamError, match="NIXL_ETCD_ENDPOINTS"):
        far.agent.invalidate_local_metadata()
    with pytest.raises(_bindings.nixlNotAllowedError, match=r"NIXL_ERR_NOT_ALLOWED: .*lease") as caught:
        near.move("READ", *descs, "far-away")
    assert caught.value.code in ("not-permitted", "lease-ended")
    near.knows(far)
    assert near.move("READ", *descs, "far-away") == "DONE"


def test_a_secret_is_not_enough(ends: tuple[End, End]) -> None:
    _, far = ends
    told = bytearray(far.agent.get_agent_metadata())
    stranger = End("stranger")
    token = told.index(b"tcp://")
    token += told[token:].index(b"\x01\x00\x00\x00") - 16  # before the number of sections
    told[token] ^= 1
    stranger.agent.add_remote_agent(bytes(told))
    with pytest.raises(_bindings.nixlNotAllowedError):
        stranger.move("READ", stranger.descs((0, 64)), far.descs((0, 64)), "far-away")


def test_serialized_lists_are_lists_alone(ends: tuple[End, End]) -> None:
    near, _ = ends
    descs = near.descs((0, 64), (64, 64))
    assert near.agent.deserialize_descs(near.agent.get_serialized_descs(descs)) == descs
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system is not a list"):
        near.agent.deserialize_descs(b"cposix\nsystem\n(S'true'\ntR.")


@pytest.mark.parametrize("count", [1, 300])
def test_irregular_lists_are_few_transfers(ends: tuple[End, End], count: int, seed: int) -> None:
    near, far = ends
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 3000, count)
    starts = np.cumsum(sizes) - sizes
    near_places = [(int(at), int(nbytes)) for at, nbytes in zip(starts, sizes, strict=True)]
    shifted = [(at + 13, nbytes) for at, nbytes in near_places]
    handle = near.agent.initialize_xfer("WRITE", near.descs(*near_places), far.descs(*shifted), "far-away")
    assert near.agent.agent._request(handle._handle).num_transfers <= 1 + count // 100
    assert near.move("WRITE", near.descs(*near_places), far.descs(*shifted), "far-away") == "DONE"
    total = int(sizes.sum())
    assert np.array_equal(far.memory[13 : 13 + total], near.memory[:total])


PEER = """
import sys, time
import numpy as np
from kvxfer.connectors.nixl import nixl_agent, nixl_agent_config
agent = nixl_agent("child", nixl_agent_config())
memory = np.zeros(1 << 20, np.uint8)
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
print(agent.get_agent_metadata().hex(), memory.ctypes.data, flush=True)
time.sleep(600)
"""


def test_agents_exchange_metadata_by_their_own_way() -> None:
    ends = [End(name, enable_listen_thread=True, listen_port=0) for name in ("one", "another")]
    ports = [end.agent.agent._raw_agent.port for end in ends]
    one, another = ends

    def comes(end: End, name: str, wanted: bool) -> None:
        until(lambda: end.agent.check_remote_metadata(name) == wanted, name)

    one.agent.fetch_remote_metadata("another", "127.0.0.1", ports[1])
    comes(one, "another", True)
    assert one.move("READ", one.descs((0, 4096)), another.descs((0, 4096)), "another") == "DONE"
    one.agent.send_local_metadata("127.0.0.1", ports[1])
    comes(another, "one", True)
    assert another.move("WRITE", another.descs((0, 64)), one.descs((64, 64)), "one") == "DONE"
    one.agent.invalidate_local_metadata("127.0.0.1", ports[1])
    comes(another, "one", False)
    # An agent without a listening thread hands its metadata to nobody that asks.
    closed = End("closed")
    assert not closed.agent.check_remote_metadata("one")
    one.agent.fetch_remote_metadata("closed", "127.0.0.1", closed.agent.agent._raw_agent.port)
    one.agent.send_local_metadata("127.0.0.1", closed.agent.agent._raw_agent.port)
    one.agent.fetch_remote_metadata("another", "127.0.0.1", ports[1])
    comes(one, "another", True)
    assert not one.agent.check_remote_metadata("closed")
    assert not closed.agent.check_remote_metadata("one")
    for end in (*ends, closed):
        end.agent.agent.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_peer_that_ends_is_told_in_time_and_may_come_back(how: signal.Signals) -> None:
    near = End("near")
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", PEER], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as child:
            try:
                assert child.stdout is not None
                metadata, address = child.stdout.readline().split()
                assert near.agent.add_remote_agent(bytes.fromhex(metadata)) == b"child"
                far = near.agent.get_xfer_descs([(int(address), 4096, 0)], "DRAM")
                assert near.move("WRITE", near.descs((0, 4096)), far, "child") == "DONE"
            finally:
                os.kill(child.pid, how)
        with pytest.raises((_bindings.nixlRemoteDisconnectError, _bindings.nixlNotFoundError)):
            near.move_until(lambda: near.descs((0, 4096)), far, "child")
    near.agent.agent.close()


@pytest.mark.parametrize(
    ("word", "asked", "is_there"), [("y", False, True), ("OFF", True, False), (None, True, True)]
)
def test_telemetry_is_as_the_environment_says(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, word: str | None, asked: bool, is_there: bool
) -> None:
    _, far = ends
    if word is not None:
        monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", word)
    near = End("telling", capture_telemetry=asked)
    near.knows(far)
    handle = near.agent.initialize_xfer("READ", near.descs((0, 4096)), far.descs((0, 4096)), "far-away")
    near.agent.transfer(handle)
    while near.agent.check_xfer_state(handle) == "PROC":
        pass
    if is_there:
        told = near.agent.get_xfer_telemetry(handle)
        assert (told.totalBytes, told.descCount) == (4096, 1)
        assert abs(told.startTime / 1e6 - time.time()) < 600
        assert 0 < told.postDuration <= told.xferDuration
    else:
        with pytest.raises(_bindings.nixlNoTelemetryError):
            near.agent.get_xfer_telemetry(handle)
    near.agent.agent.close()
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "perhaps")
    with pytest.raises(RuntimeError, match="NIXL_TELEMETRY_ENABLE"):
        nixl_agent("unsure")


def test_many_threads_use_one_agent(ends: tuple[End, End]) -> None:
    near, far = ends
    ended: list[str] = []

    def work(number: int) -> None:
        place = (number * 4096, 4096)
        for _ in range(30):
            ended.append(near.move("WRITE", near.descs(place), far.descs(place), "far-away", b"x"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert ended == ["DONE"] * 180
    told: list[bytes] = []
    until = time.monotonic() + BOUND_S
    while len(told) < 180 and time.monotonic() < until:
        told += far.agent.get_new_notifs().get("near", [])
    assert told == [b"x"] * 180


def test_it_is_nixl_only_where_that_is_asked_for() -> None:
    program = """
import sys
from kvxfer.connectors.nixl import install_as_nixl
assert "nixl" not in sys.modules
install_as_nixl()
from nixl._api import nixl_agent
import nixl._bindings, nixl._utils, nixl.logging
import nixl, kvxfer.connectors.nixl as ours
assert nixl is ours and nixl_agent is ours.nixl_agent
"""
    beside = {**os.environ, "PYTHONPATH": str(ROOT / "connectors/nixl/distribution")}

    def run(program: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False
        )

    assert run(program).returncode == 0
    refused = run("from kvxfer.connectors.nixl import install_as_nixl; install_as_nixl()", beside)
    assert "ImportError: nixl is installed" in refused.stderr
    assert run("import nixl; print(nixl.__name__)", beside).stdout.split() == ["kvxfer.connectors.nixl"]
