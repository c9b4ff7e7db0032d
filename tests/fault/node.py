"""One end of a fault test: an agent with a cache, in this process or in another.

`Worker` is the proxy of a `Node` in another process, which it may kill, stop and resume. It signals no other
process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvxfer import AgentOptions, AgentStats, KVLayout, LeaseToken, Pool
from kvxfer.agent import Agent
from kvxfer.errors import KvxferError, PeerError, TransferError
from tests.fault import (
    confinement as confinement,
)  # modules for `Worker.do`, which could not be imported under its limits
from tests.fork_server import Forked
from tests.waiting import until

ROOT: Final = Path(__file__).resolve().parents[2]
# Layers, K and V, blocks, tokens, heads, dim; 2, 32 and 64 MiB in all.
SMALL: Final = (4, 2, 32, 8, 4, 128)
MEDIUM: Final = (8, 2, 64, 32, 4, 128)
LARGE: Final = (8, 2, 64, 32, 8, 128)
# Contracts 6 and 7: everything ends long before this bound, even on a machine that stalls for seconds. Work
# and leases last longer, so that a hang is found and not ended by a deadline.
BOUND_S: Final = 30.0
LONG_S: Final = 2 * BOUND_S
# The silence timeout of nodes that should notice a silent peer. All others have a long one, because a machine
# may starve a process for a moment.
HASTY_S: Final = 3.0
SECRET: Final = b"a secret for tests only"

_RAILS: Final = {
    "shm": AgentOptions(transports=("shm",)),
    "tcp": AgentOptions(transports=("tcp",), transport_options={"tcp.rails": 2}),
    "ucx": AgentOptions(transports=("ucx",), transport_options={"ucx.transports": "tcp", "tcp.rails": 1}),
    "libfabric": AgentOptions(transports=("libfabric",), transport_options={"tcp.rails": 1}),
    "libfabric-written": AgentOptions(
        transports=("libfabric",), transport_options={"tcp.rails": 1, "libfabric.way": "write"}
    ),
    "loopback": AgentOptions(transports=("loopback",)),
}


def options_for(transport: str, **changes: Any) -> AgentOptions:
    """Returns options under which a slow peer is not lost."""
    base = replace(
        _RAILS[transport],
        heartbeat_interval_s=0.2,
        silent_timeout_s=LONG_S,
        handshake_timeout_s=BOUND_S,
        secret=b"",
    )
    return replace(base, **changes)


class Node:
    """An agent, a pool, a region ``"kv"``, and numbered peers, leases and works.

    `axes` and `held` (keywords of ``KVLayout.from_tensor``) say how the memory is laid out; without `pooled`
    the region is not in a pool, like an engine's own memory, and others read it by process_vm_readv.
    """

    def __init__(
        self,
        name: str,
        transport: str,
        shape: tuple[int, ...] = SMALL,
        axes: str = "l2bthd",
        held: dict[str, Any] | None = None,
        pooled: bool = True,
        **options: Any,
    ) -> None:
        self.agent = Agent(name, options_for(transport, **options))
        nbytes = int(np.prod(shape)) * 2
        self.pool = Pool(shape[2], nbytes // shape[2], huge_pages=False)
        self.array: NDArray[np.uint16] = (
            self.pool.array(shape, np.uint16) if pooled else np.zeros(shape, np.uint16)
        )
        self.region = self.agent.register(
            "kv", self.array, KVLayout.from_tensor(self.array, axes, **(held or {}))
        )
        self.all = list(range(shape[2]))
        self.num_layers = shape[0]
        self.peers: list[Any] = []
        self.leases: list[Any] = []
        self.works: list[Any] = []
        self._held: Any = None  # the event for which the last layer of a read waits

    # ---- memory -----------------------------------------------------------------------------

    def fill(self, seed: int) -> None:
        """Fills the memory with values that depend on the seed and the position."""
        for layer in range(self.num_layers):
            self.array[layer] = self.pattern(seed, layer)

    def set(self, value: int, ids: Iterable[int] | None = None) -> None:
        """Writes one value everywhere or into blocks, as if they were used again."""
        self.array[:, :, self._index(ids)] = value

    def is_all(self, value: int, ids: Iterable[int] | None = None) -> bool:
        return bool((self.array[:, :, self._index(ids)] == value).all())

    def stays(self, value: int, for_s: float = 0.1) -> bool:
        """Sleeps, so that bytes could land that must not, and returns whether all still is this value."""
        time.sleep(for_s)
        return self.is_all(value)

    def has_any(self, value: int, ids: Iterable[int] | None = None) -> bool:
        return bool((self.array[:, :, self._index(ids)] == value).any())

    def _index(self, ids: Iterable[int] | None) -> slice | list[int]:
        return slice(None) if ids is None else list(ids)

    def holds(self, seed: int, ids: Iterable[int] | None = None, layers: range | None = None) -> bool:
        """Whether blocks hold what `fill` writes there."""
        blocks = self._index(ids)
        return all(
            np.array_equal(self.array[layer][:, blocks], self.pattern(seed, layer)[:, blocks])
            for layer in layers or range(self.num_layers)
        )

    def pattern(self, seed: int, layer: int) -> NDArray[np.uint16]:
        """Returns what `fill` writes into a layer; all layers at once would cost more by their pages."""
        count = self.array[layer].nbytes // 8
        numbers = np.arange(layer * count + 1, (layer + 1) * count + 1, dtype=np.uint64)
        numbers *= np.uint64(0x9E3779B97F4A7C15 + 2 * seed)
        return numbers.view(np.uint16).reshape(self.array.shape[1:])

    # ---- verbs, by number --------------------------------------------------------------------

    def name_of(self) -> str:
        return self.agent.name

    def address(self) -> str:
        return self.agent.address

    def address_for(self, target: str) -> str:
        return self.agent.address_for(target)

    def connect(self, address: str, timeout_s: float = BOUND_S) -> int:
        peer = self.agent.connect_blocking(address, timeout_s)
        peer.region_blocking("kv", timeout_s)
        self.peers.append(peer)
        return len(self.peers) - 1

    def accept(self, name: str, timeout_s: float = BOUND_S) -> int:
        peer = self.agent.accept_blocking(name, timeout_s)
        peer.region_blocking("kv", timeout_s)
        self.peers.append(peer)
        return len(self.peers) - 1

    def disconnect(self, peer: int = -1) -> None:
        self.peers[peer].disconnect()

    def peer_state(self, peer: int = -1) -> tuple[str, str]:
        """Returns the state and the code of the error."""
        error = self.peers[peer].error
        return self.peers[peer].state, "" if error is None else error.code

    def wait_lost(self, peer: int = -1, timeout_s: float = BOUND_S) -> str:
        """Returns why a peer was lost."""
        until(lambda: self.peers[peer].state == "lost", lambda: self.peers[peer], timeout_s=timeout_s)
        return self.peer_state(peer)[1]

    def loss_in_words(self, peer: int = -1) -> str:
        return str(self.peers[peer].error)

    def rails(self, peer: int = -1) -> tuple[str, ...]:
        return tuple(self.peers[peer].rails)

    def wait_rails(self, *wanted: str, peer: int = -1, timeout_s: float = BOUND_S) -> None:
        """Waits until these rails are up, in any order; each end learns of a rail at its own time."""
        until(
            lambda: sorted(self.rails(peer)) == sorted(wanted), lambda: self.peers[peer], timeout_s=timeout_s
        )

    def wait_redialled(self, count: int) -> None:
        """Waits until so many rails have come back; each end learns of a rail at its own time."""
        until(lambda: self.stats()["rails_redialled"] >= count, self.stats, timeout_s=BOUND_S)
        assert self.stats()["rails_redialled"] == count

    def path(self, peer: int = -1) -> tuple[str, str]:
        """Returns the rail over which the peer's region is fetched, and why others are not used."""
        region = self.peers[peer].regions["kv"]
        return region.path, "; ".join((*region.notes, *self.peers[peer].notes))

    def grant(
        self,
        mode: Literal["read", "write"],
        ids: list[int] | None = None,
        peer: int | None = -1,
        ttl_s: float = LONG_S,
        renewable: bool | None = None,
    ) -> int:
        """Grants a lease to a peer, or with None to any peer that presents the token."""
        holder = None if peer is None else self.peers[peer]
        self.leases.append(self.region.grant(holder, ids, mode, ttl_s, renewable=renewable))
        return len(self.leases) - 1

    def token(self, lease: int = -1) -> LeaseToken:
        found: LeaseToken = self.leases[lease].token
        return found

    def lease_state(self, lease: int = -1) -> str:
        return str(self.leases[lease].state)

    def revoke(self, lease: int = -1) -> str:
        self.leases[lease].revoke_blocking()
        return str(self.leases[lease].state)

    def wait_lease(self, lease: int = -1, timeout_s: float = BOUND_S) -> str:
        return str(self.leases[lease].ended_blocking(timeout_s))

    def write(self, ids: list[int] | None = None, peer: int = -1, **options: Any) -> int:
        return self._post(self.agent.write, ids, peer, options)

    def read(self, ids: list[int] | None = None, peer: int = -1, **options: Any) -> int:
        return self._post(self.agent.read, ids, peer, options)

    def _post(self, verb: Any, ids: list[int] | None, peer: int, options: dict[str, Any]) -> int:
        ids = self.all if ids is None else ids
        options.setdefault("timeout_s", LONG_S)
        self.works.append(verb(self.region, self.peers[peer].regions["kv"], ids, ids, **options))
        return len(self.works) - 1

    def expect(self, tag: bytes, ids: list[int] | None = None, timeout_s: float = LONG_S) -> int:
        self.works.append(self.agent.expect(tag, self.all if ids is None else ids, timeout_s=timeout_s))
        return len(self.works) - 1

    def read_until_bytes_land(self, *, held: bool = False, **options: Any) -> int:
        """Posts a read of everything into cleared memory, and returns in the middle of it.

        A held read does not end before `let_go`, however slow this machine is, because its last layer waits.
        A free read may have ended when this returns.
        """
        if held:
            self._held = self.agent.trigger()
            options["after"] = self._held.by_layer(1)
            self._held.fire(self.num_layers - 1)
        work = self.read(**options)
        self.until_bytes_land()
        return work

    def let_go(self) -> None:
        """Releases the last layer of a held read; does nothing for a free read."""
        if self._held is not None:
            self._held.fire(self.num_layers)

    def write_all_but_the_last_layer(self, **options: Any) -> int:
        """Posts a write of everything that does not end before all of its layers are released."""
        work = self.write(hold=True, **options)
        self.release(self.num_layers - 1, work)
        return work

    def until_bytes_land(self, timeout_s: float = BOUND_S) -> None:
        """Returns when the first bytes of anything have landed in memory that was cleared."""
        first = self.array[:, :, :, 0, 0, 0]
        until(first.any, "nothing landed", timeout_s=timeout_s, pause_s=0.0002)

    def release(self, num_layers: int, work: int = -1) -> None:
        self.works[work].mark_ready(num_layers)

    def wait_layer(self, layer: int, work: int = -1, timeout_s: float = BOUND_S) -> None:
        self.works[work].layer_blocking(layer, timeout_s)

    def cancel(self, work: int = -1) -> None:
        self.works[work].cancel()

    def state(self, work: int = -1) -> str:
        return str(self.works[work].state)

    def end(self, work: int = -1, timeout_s: float = BOUND_S) -> KvxferError | None:
        """Waits for the end and returns its error; a TimeoutError means a hang, which is a bug."""
        try:
            self.works[work].wait(timeout_s)
        except KvxferError as error:
            return error
        return None

    def forget(self) -> None:
        """Forgets all leases and works, and all peers except the last."""
        del self.peers[:-1], self.leases[:], self.works[:]

    def deregister(self) -> None:
        self.region.deregister_blocking()

    def stats(self) -> AgentStats:
        return self.agent.stats()

    def wait_idle(self, timeout_s: float = BOUND_S) -> None:
        """Waits until no transfer is open; one end may know of an end earlier than the other."""
        until(lambda: not self.stats()["transfers_open"], self.stats, timeout_s=timeout_s)

    def close(self) -> None:
        self.agent.close()

    # ---- the process --------------------------------------------------------------------------

    def footprint(self) -> tuple[int, int, int]:
        """Returns descriptors, threads and resident bytes of this process."""
        return footprint()

    def rounds(self, address: str, count: int) -> int:
        """Connects and disconnects, `count` times; returns how many worked."""
        for _ in range(count):
            peer = self.agent.connect_blocking(address, BOUND_S)
            peer.disconnect()
        return count

    def fork(self, stay_s: float = 0.0) -> tuple[int, dict[str, str]]:
        """Forks; the child tries every verb, stays for a while, and exits as Python does.

        Returns its process id and what each verb raised there (class and code).
        """
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            with os.fdopen(write_fd, "w") as out:
                for verb, outcome in self._try_everything().items():
                    out.write(f"{verb}={outcome}\n")
            time.sleep(stay_s)
            sys.exit(0)
        os.close(write_fd)
        with os.fdopen(read_fd) as lines:
            outcomes = dict(line.rstrip("\n").split("=", 1) for line in lines)
        return pid, outcomes

    def reap(self, pid: int, timeout_s: float = BOUND_S) -> int | None:
        """Returns a child's exit status; if the child hangs, kills it and returns None."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None

    def read_messages(self, number: int) -> list[bytes]:
        """Returns the payloads of `number` messages, in their order."""
        return [self.agent.message_blocking(BOUND_S).payload for _ in range(number)]

    def _try_everything(self) -> dict[str, str]:
        peer, lease, work = self.peers[-1], self.leases[-1], self.works[-1]
        calls = {
            "register": lambda: self.agent.register("other", np.zeros((4, 64), np.uint8)),
            "connect": lambda: self.agent.connect_blocking("tcp://127.0.0.1:1", 0.1),
            "accept": lambda: self.agent.accept_blocking(None, 0.1),
            "peers": lambda: self.agent.peers,
            "expect": lambda: self.agent.expect(b"x", [0]),
            "notification_blocking": lambda: self.agent.notification_blocking(0.1),
            "take_notification": self.agent.take_notification,
            "message_blocking": lambda: self.agent.message_blocking(0.1),
            "take_message": self.agent.take_message,
            "send": lambda: peer.send(b"message"),
            "sendable": lambda: peer.sendable_blocking(1, 0.1),
            "lease.wait": lambda: lease.wait(0.1),
            "poll": self.agent.poll,
            "stats": self.agent.stats,
            "regions": lambda: peer.regions,
            "peer.rails": lambda: peer.rails,
            "disconnect": peer.disconnect,
            "grant": lambda: self.region.grant(peer, None, "read"),
            "revoke": lease.revoke_blocking,
            "ended_blocking": lambda: lease.ended_blocking(0.1),
            "wait": lambda: work.wait(0.1),
            "cancel": work.cancel,
            "deregister": self.region.deregister_blocking,
            "write": lambda: self.agent.write(self.region, self._told, [0], [0]),
            "read": lambda: self.agent.read(self.region, self._told, [0], [0]),
        }
        outcomes = {}
        for verb, call in calls.items():
            try:
                call()
                outcomes[verb] = "nothing"
            except KvxferError as error:
                outcomes[verb] = f"{type(error).__name__} {error.code}"
            except BaseException as error:
                outcomes[verb] = f"{type(error).__name__} {error}"
        self.agent.close()  # has no effect here
        return outcomes

    def remember_remote(self) -> None:
        """Keeps the descriptor of the peer's region for a child that may not ask for it."""
        self._told = self.peers[-1].regions["kv"]


def footprint() -> tuple[int, int, int]:
    """Returns descriptors, threads and resident bytes of this process."""
    status = Path("/proc/self/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return _count("/proc/self/fd"), _count("/proc/self/task"), rss * 1024


def until_within(
    before: tuple[int, int, int],
    end: Callable[[], tuple[int, int, int]] = footprint,
    *,
    descriptors: int = 0,
    nbytes: int = 1 << 62,
) -> None:
    """Waits until a process has at most so many more descriptors and bytes than before, and no more threads.

    Descriptors of a session close after its goodbye, and a joined thread disappears a moment later.
    """
    limits = [then + more for then, more in zip(before, (descriptors, 0, nbytes), strict=True)]
    until(
        lambda: all(now <= limit for now, limit in zip(end(), limits, strict=True)),
        lambda: f"descriptors, threads, bytes: {before} -> {end()}",
    )


def _count(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


class Worker:
    """A `Node` in its own process. Every call of a `Node` method is executed there."""

    def __init__(
        self,
        *arguments: Any,
        within: tuple[str, ...] = (),
        first: Callable[[], object] | None = None,
        python: str = sys.executable,
        root: Path = ROOT,
        **options: Any,
    ) -> None:
        """Takes the arguments of `Node`.

        `within` is the beginning of the command, e.g. another namespace; `first` runs there before there is
        a node (`tests.fault.confinement`); another version of kvxfer is in `python`'s environment, and the
        tests of that version are in `root`.
        """
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process: subprocess.Popen[Any] = (
                subprocess.Popen(
                    [*within, python, "-m", "tests.fault.node", "0"],
                    cwd=root,
                    env=environment,
                    stdin=theirs.fileno(),
                )
                if within or python != sys.executable
                else Forked(
                    "from tests.fault import node; node.serve(0)", env=environment, stdin=theirs.fileno()
                )
            )
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        try:
            if first is not None:
                self.do(first)
            self.call("", *arguments, **options)
        except BaseException:
            self.finish()
            raise

    def __getattr__(self, verb: str) -> Any:
        return lambda *arguments, **options: self.call(verb, *arguments, **options)

    def call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            self._connection.send((verb, arguments, options))
            if not self._connection.poll(LONG_S):
                raise TimeoutError(f"process {self.process.pid} did not answer {verb} in {LONG_S} s")
            failed, value = self._connection.recv()
        if failed:
            raise value
        return value

    def do(self, function: Callable[..., object], *arguments: Any) -> Any:
        """Runs a function of a module there, beside the node."""
        return self.call("do", function, *arguments)

    def kill(self) -> None:
        """Sends SIGKILL; the process has ended when this returns."""
        self.process.kill()
        self.process.wait(BOUND_S)

    def stop(self) -> None:
        """Sends SIGSTOP; all threads have stopped when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        """Ends the process, whatever state it is in."""
        self._connection.close()
        if self.process.poll() is None:
            self.resume()
            self.process.kill()
        self.process.wait(BOUND_S)


Local = Callable[..., Node]
Remote = Callable[..., Worker]
#: Codes of a lost peer.
LOST: Final = {"peer-lost", "peer-silent", "peer-restarted"}


def join(survivor: Node, newcomer: Worker) -> None:
    """Connects a worker to a node of this process."""
    newcomer.connect(survivor.address())
    survivor.accept(str(newcomer.name_of()))


def lost(error: object, code: str | None = None) -> None:
    """Asserts an error that names the lost peer and the blocks, each once."""
    assert isinstance(error, PeerError | TransferError), error
    assert error.code in (LOST if code is None else {code}), error
    assert error.peer
    assert 0 < len(error.failed_blocks) == len(set(error.failed_blocks.tolist())), error


def serve(fd: int) -> None:
    """Makes a `Node` and executes calls of it, until the connection of this number ends."""
    connection = Connection(fd)
    node: Node | None = None
    while True:
        try:
            verb, arguments, options = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            value: Any = None
            if verb == "do":
                value = arguments[0](*arguments[1:])
            elif node is None:
                node = Node(*arguments, **options)
            else:
                value = getattr(node, verb)(*arguments, **options)
            connection.send((False, value))
        except Exception as error:
            connection.send((True, error))


def moves_both_ways(here: Node | Worker, there: Node | Worker, seed: int) -> None:
    """In an open session, `here` reads all pages of `there` and writes all of its own."""
    there.fill(seed)
    there.grant("read")
    here.read(lease=there.token())
    assert here.end() is None
    assert here.holds(seed)
    here.fill(seed + 1)
    there.grant("write")
    here.write(lease=there.token())
    assert here.end() is None
    assert there.holds(seed + 1)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
