"""A process that uses agents exits like any process, whatever its threads are doing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import fork_server
from tests.fault.node import BOUND_S, ROOT

PROGRAM = """
import asyncio, sys, threading
import numpy as np
from kvxfer import Agent, ExhaustedError, KvxferError, UsageError

verb, ending = sys.argv[1:]
a, b = Agent("a"), Agent("b")
src = a.register("kv", np.ones((16, 64), np.uint8))
dst = b.register("kv", np.zeros((16, 64), np.uint8))
peer = a.connect_blocking(b.address)
remote = peer.region_blocking("kv")
lease = dst.grant(b.accept_blocking("a"), mode="write", ttl_s=600)
pending = a.write(src, remote, [1], [2], hold=True, timeout_s=600)
incoming = b.expect(b"tag", [1], timeout_s=600)
ring = a.command_ring(16)

def over_and_over(call):
    def go():
        while True:
            call()
    return go

def send():
    try:
        peer.send(b"message")
    except ExhaustedError:
        peer.sendable_blocking(1)

async def await_all():
    async def notes():
        async for _ in a.notifications():
            pass
    await asyncio.gather(pending, incoming, incoming.layer(0), notes(), a.accept("ghost"),
                         peer.region("none", None), lease.ended(), ring.ended(1))

verbs = {
    "wait": pending.wait,
    "layer_blocking": lambda: incoming.layer_blocking(0),
    "accept": lambda: a.accept_blocking("ghost"),
    "notification_blocking": a.notification_blocking,
    "message_blocking": a.message_blocking,
    "send": over_and_over(send),
    "told": over_and_over(lambda: dst.grant(lease.peer, [1]).wait().revoke_blocking()),
    "region_blocking": lambda: peer.region_blocking("none", None),
    "ended_blocking": lease.ended_blocking,
    "ring": lambda: ring.ended_blocking(1),
    "poll": over_and_over(a.poll),
    "stats": over_and_over(a.stats),
    "state": over_and_over(lambda: (lease.state, peer.state, pending.state, a.peers)),
    "write": over_and_over(lambda: a.write(src, remote, [1, 2], range(3, 5)).wait()),
    "cancel": over_and_over(lambda: a.write(src, remote, [1], [2], hold=True).cancel()),
    "grant": over_and_over(lambda: dst.grant(None, [1]).revoke_blocking()),
    "register": over_and_over(lambda: a.register("more", np.zeros((2, 8), np.uint8)).deregister_blocking()),
    "connect": over_and_over(lambda: a.connect_blocking(b.address)),
    "agents": over_and_over(lambda: Agent("more").close()),
    "asyncio": lambda: asyncio.run(await_all()),
}
entered = threading.Barrier(3)

def thread():
    entered.wait()
    try:
        verbs[verb]()
    except (KvxferError, TimeoutError) as error:
        if isinstance(error, UsageError) and "registered already" not in str(error):
            raise

for _ in range(2):
    threading.Thread(target=thread, daemon=True).start()
entered.wait()
for _ in range(200):  # rounds in which the threads come to stand where they block
    a.poll()
if ending == "close":
    a.close()
    b.close()
elif ending == "drop":
    del a, b, src, dst, peer, lease
"""

VERBS = (
    "wait layer_blocking accept notification_blocking message_blocking send told region_blocking "
    "ended_blocking ring poll stats state write cancel grant register connect agents asyncio"
)


@pytest.mark.parametrize("ending", ["close", "open", "drop"])
@pytest.mark.parametrize("verb", VERBS.split())
def test_an_exit_is_clean_with_threads_in(verb: str, ending: str) -> None:
    done = fork_server.run(PROGRAM, verb, ending, timeout=4 * BOUND_S)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr
    assert "NativeError" not in done.stderr


def test_agents_of_a_process_that_exits_say_goodbye() -> None:
    """Peers do not wait for the silence timeout; they learn that it was closed."""
    from kvxfer import Agent

    program = """
import sys
from kvxfer import Agent
agent = Agent("child")
agent.connect_blocking(sys.argv[1])
sys.stdin.read(1)
"""
    with Agent("here") as here:
        child = fork_server.Forked(program, here.address, stdin=subprocess.PIPE, text=True)
        peer = here.accept_blocking("child", BOUND_S)
        child.communicate("x", timeout=BOUND_S)
        assert child.returncode == 0
        while peer.state == "open":
            here.poll()
        assert peer.error is not None
        assert "closed" in str(peer.error)


LATE = """
import builtins, kvxfer

class Holder:
    def __init__(self):
        self.agent = kvxfer.Agent("late")
    def __del__(self):
        self.agent.close()

builtins.holder = Holder()
"""

SECOND = """
import numpy as np
import {interpreters} as interpreters
from kvxfer import Agent

agent = Agent("first")
second = interpreters.create()
try:  # from 3.13 on it returns what was raised
    error = interpreters.run_string(second, "import kvxfer._native")
except Exception as raised:
    error = raised
assert "start a process instead" in str(getattr(error, "msg", error)), error
interpreters.destroy(second)
assert agent.stats()["transfers_open"] == 0
agent.register("kv", np.zeros((4, 64), np.uint8))
agent.close()
Agent("later").close()
"""


def quiet(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, timeout=4 * BOUND_S, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_agent_that_is_closed_when_nothing_can_be_imported_any_more_closes_in_silence() -> None:
    quiet(LATE)


def test_a_second_interpreter_is_refused_in_words_and_costs_the_first_nothing() -> None:
    interpreters = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    quiet(SECOND.format(interpreters=interpreters))
