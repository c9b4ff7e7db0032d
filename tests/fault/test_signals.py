"""Signals and exits in the middle of everything: verbs continue or are interrupted, and peers learn of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import PeerError, TransferError
from tests.fault.node import BOUND_S, MEDIUM, ROOT, Local, Remote
from tests.fault.test_process_faults import works_with
from tests.fork_server import Forked
from tests.waiting import until

NUM_BLOCKS = MEDIUM[2]
# The blocks that each end moves: the survivor reads, the child writes and holds the rest back, the child
# reads.
READ, WRITTEN, FETCHED = (
    list(range(NUM_BLOCKS))[part] for part in (slice(0, 32), slice(32, 48), slice(48, None))
)


@contextmanager
def child(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a program that is controlled by lines; ends it afterwards."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = Forked(program, *arguments, **pipes, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def says(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().rstrip() == line, process.stderr and process.stderr.read()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    print(file=process.stdin, flush=True)


# ---- interrupted --------------------------------------------------------------------------------

# A handler that prints while the main thread prints raises "reentrant call inside BufferedWriter".
# `os.write` has no buffer, so it may be interrupted anywhere.
BLOCKED = """
import os, signal, socket, sys, threading
import kvxfer
from tests.fault.node import BOUND_S, Node

def say(line):
    os.write(1, line.encode() + b"\\n")

node = Node("child", sys.argv[2])
node.fill(3)
node.connect(sys.argv[1])
agent, peer = node.agent, node.peers[-1]
lease = node.leases[node.grant("read")]
write = node.works[node.write([0, 1], hold=True, notify=b"req")]
incoming = node.works[node.expect(b"never", [2])]
silent = socket.create_server(("127.0.0.1", 0))
while True:
    try:
        peer.send(bytes(1 << 16))
    except kvxfer.ExhaustedError:
        break
verbs = {
    "wait": write.wait,
    "group": kvxfer.Group([write, incoming]).wait,
    "layer": lambda: incoming.layer_blocking(0),
    "accept": lambda: agent.accept_blocking("nobody"),
    "connect": lambda: agent.connect_blocking(f"tcp://127.0.0.1:{silent.getsockname()[1]}", 2 * BOUND_S),
    "notification": agent.notification_blocking,
    "message": agent.message_blocking,
    "sendable": lambda: peer.sendable_blocking(1 << 16),
    "region": lambda: peer.region_blocking("none", None),
    "lease": lease.ended_blocking,
}
signal.signal(signal.SIGUSR1, lambda *_: say("goes on"))
if sys.argv[3] == "another thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGINT])
for name, verb in verbs.items():
    try:
        say(name)
        verb()
    except KeyboardInterrupt:
        say("interrupted")
write.mark_ready(node.num_layers)
write.wait(BOUND_S)
assert incoming.state == "pending"
assert node.peer_state() == ("open", "")
"""
VERBS = "wait group layer accept connect notification message sendable region lease"


def until_asleep(pid: int) -> None:
    """Waits until the main thread sleeps, most likely in the verb; this is all that is checked."""
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] in "SZ", "it never sleeps")


@pytest.mark.parametrize("told", ["the main thread", "another thread"])
def test_a_signal_leaves_a_verb_or_lets_it_go_on_and_costs_nothing_else(
    told: str, transport: str, local: Local
) -> None:
    """If another thread gets the signal, it interrupts no system call of the main thread. The same holds for
    a signal just before the call begins.
    """
    here = local("here", transport)
    here.expect(b"req", [0, 1])
    with child(BLOCKED, here.address(), transport, told) as process:
        here.accept("child")
        for verb in VERBS.split():
            says(process, verb)
            until_asleep(process.pid)
            for _ in range(3):
                process.send_signal(signal.SIGUSR1)
                says(process, "goes on")
            process.send_signal(signal.SIGINT)
            says(process, "interrupted")
        _, words = process.communicate(timeout=BOUND_S)
        assert process.returncode == 0, words
    assert here.end() is None
    assert here.holds(3, [0, 1])
    assert here.wait_lost() == "peer-lost"


# ---- left to the program ------------------------------------------------------------------------

WAITS = """
import asyncio, os, signal, sys
from pathlib import Path
import numpy as np
from kvxfer import Agent, AgentOptions
from kvxfer._native import transports
from kvxfer.connectors.common.helper_threads import HelperThreads
from kvxfer.connectors.nixl import nixl_agent
from kvxfer.directory import InProcessDirectory
from kvxfer.loop_thread import LoopThread

named = tuple(kind["name"] for kind in transports() if not kind["why_off"] and kind["name"] != "loopback")
options = AgentOptions(transports=named, copy_threads=3, daemon=sys.argv[1])
directory = InProcessDirectory()
near, far = Agent("near", options, directory=directory), Agent("far", options, directory=directory)
source = near.register("kv", np.ones((4, 1 << 20), np.uint8))
target = far.register("kv", np.zeros((4, 1 << 20), np.uint8))
peer = near.connect_blocking("far")
target.grant(far.accept_blocking("near"), mode="write")
near.write(source, peer.region_blocking("kv"), [0, 1, 2], [1, 2, 3]).wait(60)
door, loop, threads = nixl_agent("door"), LoopThread("loop"), HelperThreads(2)
threads.submit(print, "moved", flush=True).result()
asyncio.run(source.deregister())
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
for task in Path("/proc/self/task").iterdir():
    try:
        status = (task / "status").read_text()
    except OSError:  # the thread has ended
        continue
    if not int(status.partition("SigBlk:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
        print("takes signals:", status.splitlines()[0], flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print(signal.sigwait({signal.SIGTERM}).name, flush=True)
near.close(), far.close()
"""


def test_a_signal_that_the_program_waits_for_reaches_it(tmp_path: Path) -> None:
    """With a thread of each kind that kvxfer starts. Those of numpy take signals."""
    done = subprocess.run(
        [sys.executable, "-c", WAITS, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * BOUND_S,
    )
    assert done.stdout.splitlines() == ["moved", "SIGTERM"], (done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr


# ---- ended --------------------------------------------------------------------------------------

ENDS = """
import os, signal, sys
from tests.fault.node import MEDIUM, Node

def leave(*_):
    sys.exit(3)

def raises():
    raise LookupError("not caught")

address, transport, ending, *told = sys.argv[1:]
read, written, fetched = ([int(block) for block in ids.split(",")] for ids in told)
endings = {
    "exception": raises,
    "handler": lambda: (signal.signal(signal.SIGTERM, leave), signal.raise_signal(signal.SIGTERM)),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "_exit": lambda: os._exit(3),
    "terminate": lambda: signal.raise_signal(signal.SIGTERM),
}
node = Node("child", transport, MEDIUM)
node.set(5)
node.connect(address)
node.grant("read", read)
print("granted", flush=True)
sys.stdin.readline()
node.write(written, hold=True)
node.release(2)
node.read(fetched)
print("moves", flush=True)
endings[ending]()
node.end()
"""
# The exit statuses. The first three run Python's exit handlers, the others end at once.
ENDINGS = {
    "exception": 1,
    "handler": 3,
    "interrupt": -signal.SIGINT,
    "_exit": 3,
    "terminate": -signal.SIGTERM,
}


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_process_that_ends_in_mid_transfer_is_told_of_and_writes_nothing_later(
    transport: str, local: Local, remote: Remote
) -> None:
    here = local("here", transport, MEDIUM)
    told = [",".join(map(str, ids)) for ids in (READ, WRITTEN, FETCHED)]
    for ending, status in ENDINGS.items():
        here.set(0)
        with child(ENDS, here.address(), transport, ending, *told) as process:
            here.accept("child")
            says(process, "granted")
            leases = [here.grant("write", WRITTEN), here.grant("read", FETCHED)]
            read = here.read(READ)
            tell(process)
            says(process, "moves")
            _, words = process.communicate(timeout=BOUND_S)
        assert process.returncode == status, (ending, words)
        error = here.end(read)
        failed: set[int] = set()
        if error is not None:
            assert isinstance(error, PeerError | TransferError), error
            failed = set(error.failed_blocks.tolist())
            assert failed, error
            assert failed <= set(READ), ending
        # Blocks that the error does not name are valid.
        assert here.is_all(5, set(READ) - failed), ending
        assert here.wait_lost() == "peer-lost"
        assert [here.wait_lease(lease) for lease in leases] == ["peer-lost", "peer-lost"]
        here.set(7)
        here.wait_idle()
        assert here.is_all(7)
    works_with(here, remote("second", transport, MEDIUM), 9)
