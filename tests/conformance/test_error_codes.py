"""Each row of docs/errors.md: its cause, on real agents, raises its code."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, KVLayout, Pool, plan
from kvxfer._native import transports
from kvxfer.directory import Entry
from kvxfer.errors import CODE_NAMES, KvxferError, class_of

ROOT = Path(__file__).parents[2]
BOUND_S = 30.0

# Codes whose causes need another process, a device or a network that fails, and the tests that have them.
ELSEWHERE = {
    "again": "tests/native/conformance.h",
    "integrity": "tests/native/test_simulation_faults.cpp",
    "no-path": "tests/native/test_simulation_faults.cpp",
    "rail-failed": "tests/fault/test_network_faults.py",
    "peer-silent": "tests/fault/test_standstill.py",
    "protocol": "tests/native/test_session_versions.cpp",
}


class Ends:
    """An agent that reads and writes, one whose memory it is, and a session."""

    def __init__(self) -> None:
        self.near, self.far = Agent("near"), Agent("far")
        self.ours = self.near.register("kv", np.ones((8, 64), np.uint8))
        self.theirs = self.far.register("kv", np.zeros((8, 64), np.uint8))
        self.peer = self.near.connect_blocking(self.far.address, BOUND_S)
        self.caller = self.far.accept_blocking("near", BOUND_S)
        self.remote = self.peer.region_blocking("kv", BOUND_S)
        self.theirs.grant(self.caller, [1], mode="write").wait(BOUND_S)

    def write(self, src: list[int], dst: list[int], **terms: object) -> None:
        self.near.write(self.ours, self.remote, src, dst, **terms).wait(BOUND_S)  # type: ignore[arg-type]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.near.close()
    made.far.close()


def lease_ended(ends: Ends) -> None:
    lease = ends.theirs.grant(None, [1], mode="read")
    lease.revoke_blocking()
    ends.near.read(ends.ours, ends.remote, [1], [1], lease=lease.token, timeout_s=BOUND_S).wait(BOUND_S)


def region_gone(ends: Ends) -> None:
    held = ends.near.write(ends.ours, ends.remote, [1], [1], hold=True)
    ends.ours.deregister_blocking()
    held.wait(BOUND_S)


def cancelled(ends: Ends) -> None:
    held = ends.near.write(ends.ours, ends.remote, [1], [1], hold=True)
    held.cancel()
    held.wait(BOUND_S)


def peer_lost(ends: Ends) -> None:
    held = ends.near.write(ends.ours, ends.remote, [1], [1], hold=True)
    ends.far.close()
    held.wait(BOUND_S)


def unknown_region(ends: Ends) -> None:
    ends.ours.deregister_blocking()
    ends.write([1], [1])


def refused(ends: Ends) -> None:
    ends.far.expect(b"tag", [1])
    ends.write([1], [2], notify=b"tag")


def layouts_of_two_models(_: Ends) -> None:
    layout = KVLayout.from_tensor(np.zeros((2, 2, 4, 8, 2, 16), np.float16), "l2bthd")
    plan.compile_program(replace(layout, model="one"), replace(layout, model="other"))


def layout_larger_than_its_memory(ends: Ends) -> None:
    tensor = np.zeros((8, 64), np.uint8)
    ends.near.register("half", tensor[:4], KVLayout.from_tensor(tensor, "bd"))


def transport_that_is_off(name: str, _: Ends) -> None:
    Agent("x", AgentOptions(transports=("tcp", name), require=(name,)))


def two_secrets(_: Ends) -> None:
    with Agent("a", secret=b"1" * 32) as a, Agent("b", secret=b"2" * 32) as b:
        a.connect_blocking(b.address, BOUND_S)


def another_service(ends: Ends) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as caller:
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 8)
                while caller.recv(1 << 16):
                    pass

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        ends.near.connect_blocking(f"tcp://127.0.0.1:{server.getsockname()[1]}", BOUND_S)


def another_incarnation(ends: Ends) -> None:
    ends.near.connect_blocking(Entry("far", ends.far.address, b"1" * 16), BOUND_S)


def nobody_there(ends: Ends) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ends.near.connect_blocking(f"tcp://127.0.0.1:{taken.getsockname()[1]}", BOUND_S)


def silent_one(ends: Ends) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ends.near.connect_blocking(f"tcp://127.0.0.1:{silent.getsockname()[1]}", 0.05)


def address_that_is_taken(ends: Ends) -> None:
    Agent("x", listen=ends.far.address)


def closed(ends: Ends) -> None:
    ends.near.close()
    ends.write([1], [1])


def forked(_: Ends) -> None:
    program = """
import os
from kvxfer import Agent
agent = Agent("x")
if os.fork() == 0:
    try:
        agent.stats()
    except Exception as error:
        print(error.code, flush=True)
    os._exit(0)
os.wait()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    code = done.stdout.strip()
    number = next(number for number, name in CODE_NAMES.items() if name == code)
    raise class_of(number)("in the child", code=code)


def mistake(ends: Ends) -> None:
    with Agent("x", AgentOptions(faults="mistake=1")) as broken:
        with pytest.raises(KvxferError):
            broken.connect_blocking(ends.far.address, BOUND_S)
        broken.accept_blocking("nobody", BOUND_S)


OFF = [kind for kind in transports() if kind["why_off"]]
CAUSES: list[tuple[str, Callable[[Ends], object]]] = [
    ("invalid-argument", lambda _: Agent("")),
    ("out-of-range", lambda ends: ends.write([8], [1])),
    ("duplicate-block", lambda ends: ends.write([1, 2], [3, 3])),
    ("length-mismatch", lambda ends: ends.write([1, 2], [3])),
    ("length-mismatch", layout_larger_than_its_memory),
    ("layout-mismatch", layouts_of_two_models),
    ("unknown-region", unknown_region),
    ("unsupported", lambda ends: ends.near.write(ends.ours, ends.remote, [1], [1]).layer_blocking(0)),
    *(
        ("unsupported", partial(transport_that_is_off, kind["name"]))
        for kind in transports()
        if kind["why_off"]
    ),
    ("exhausted", lambda _: Pool(4, 4096).allocate(5)),
    ("exhausted", lambda _: Pool(4, 4096).array((5, 4096), np.uint8)),
    ("not-permitted", lambda ends: ends.write([1], [2])),
    ("lease-ended", lease_ended),
    ("region-gone", region_gone),
    ("cancelled", cancelled),
    ("deadline", lambda ends: ends.write([1], [1], hold=True, timeout_s=0.05)),
    ("refused", refused),
    ("peer-lost", peer_lost),
    ("peer-restarted", another_incarnation),
    ("auth-failed", two_secrets),
    ("peer-lost", another_service),
    ("unreachable", nobody_there),
    ("no-answer", silent_one),
    ("closed", closed),
    ("forked", forked),
    ("system", address_that_is_taken),
    ("internal", mistake),
]


def test_each_row_has_a_cause_here_or_elsewhere() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| `\w+Error`", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert {code for code, _ in CAUSES} | ELSEWHERE.keys() == set(rows) == set(CODE_NAMES.values())
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())


@pytest.mark.parametrize(("code", "cause"), CAUSES, ids=[f"{i}-{row[0]}" for i, row in enumerate(CAUSES)])
def test_a_cause_raises_its_code(code: str, cause: Callable[[Ends], object], ends: Ends) -> None:
    with pytest.raises(KvxferError) as caught:
        cause(ends)
    assert caught.value.code == code, caught.value
    number = next(number for number, name in CODE_NAMES.items() if name == code)
    assert type(caught.value) is class_of(number)
