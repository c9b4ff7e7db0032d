"""This version and others on one host: an older one with the same protocol, and one with another protocol.

``make test-versions`` builds both from commits that the Makefile names, each in its own environment with the
tests of its commit, so that an older node runs the code that it was tested with.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from kvxfer.errors import KvxferError, PeerError, TransferError
from tests.fault.node import BOUND_S, LARGE, LONG_S, LOST, ROOT, SMALL, Local, Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BUILT: Final = ROOT / "build/versions"

Make = Callable[..., Worker]


@pytest.fixture
def version(remote: Make) -> Make:
    """Makes nodes in processes of their own: the version ("head", "older", "apart"), then as `remote`."""

    def make(of: str, *arguments: Any, **options: Any) -> Worker:
        home = BUILT / of
        if of == "head":
            return remote(*arguments, **options)
        if not (home / "tests").exists():
            pytest.skip("make test-versions builds other versions")
        transport = str(arguments[1])
        if f'"{transport}"' not in (home / "tests/fault/node.py").read_text():
            pytest.skip(f"the version {of!r} has no transport {transport}")
        return remote(*arguments, python=str(home / "venv/bin/python"), root=home, **options)

    return make


@pytest.fixture(params=[("head", "older"), ("older", "head")], ids=lambda pair: f"{pair[0]}-calls-{pair[1]}")
def pair(request: pytest.FixtureRequest, transport: str, version: Make) -> tuple[Worker, Worker]:
    """Two connected nodes of two versions: the one that dials and the one that is dialled."""
    caller, called = (version(of, f"{of}-node", transport, LARGE) for of in request.param)
    caller.connect(called.address())
    called.accept(caller.name_of())
    return caller, called


def ended(error: KvxferError | None, *codes: str) -> None:
    """Asserts an error that names blocks."""
    assert isinstance(error, PeerError | TransferError), error
    assert error.code in codes, error
    assert len(error.failed_blocks)


def test_the_versions_are_two(version: Make) -> None:
    """Guards the other tests, which would all pass if both were this version."""
    pids = [version(of, of, "shm").process.pid for of in ("head", "older")]
    loaded = [
        {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "_native" in line}
        for pid in pids
    ]
    assert [len(files) for files in loaded] == [1, 1]
    assert loaded[0].isdisjoint(loaded[1])
    assert str(BUILT / "older") in str(loaded[1])


def test_pages_go_both_ways_by_write_and_read(pair: tuple[Worker, Worker]) -> None:
    for seed, (src, dst) in enumerate(itertools.permutations(pair), start=1):
        src.fill(seed)
        incoming = dst.expect(b"request")
        write = src.write(notify=b"request", integrity=True)
        assert src.end(write) is None
        assert dst.end(incoming) is None
        assert dst.holds(seed)
        src.fill(10 + seed)
        src.grant("read")
        dst.read()
        assert dst.end() is None
        assert dst.holds(10 + seed)
    for node in pair:
        node.wait_idle()


def test_layers_arrive_as_they_are_released(pair: tuple[Worker, Worker]) -> None:
    for seed, (src, dst) in enumerate(itertools.permutations(pair), start=1):
        src.fill(seed)
        incoming = dst.expect(b"request")
        write = src.write(notify=b"request", hold=True)
        for layer in range(LARGE[0]):
            src.release(layer + 1, write)
            dst.wait_layer(layer, incoming)
        assert src.end(write) is None
        assert dst.end(incoming) is None
        assert dst.holds(seed)


def test_notifications_and_messages_come(transport: str, local: Local, version: Make) -> None:
    here, older = local("here", transport), version("older", "older", transport)
    here.connect(older.address())
    older.accept("here")
    (peer,) = here.agent.peers
    sent = [b"%d" % number for number in range(300)]
    for payload in sent:
        # More than one window: the older end reports what its caller has taken.
        peer.sendable_blocking(timeout_s=BOUND_S)
        peer.send(payload)
        if payload == sent[99]:
            assert older.read_messages(100) == sent[:100]
    assert older.read_messages(200) == sent[100:]
    here.grant("write")
    older.write([3], notify=b"here it is")
    assert older.end() is None
    told = here.agent.notification_blocking(BOUND_S)
    assert (told.payload, told.peer.name) == (b"here it is", "older")


def test_a_reader_is_fenced_by_an_owner_of_the_other_version(pair: tuple[Worker, Worker]) -> None:
    for owner, reader in itertools.permutations(pair):
        reader.set(0)
        owner.fill(1)
        lease = owner.grant("read")
        reader.read_until_bytes_land()
        reader.stop()
        assert owner.revoke(lease) == "revoked"
        owner.set(7)
        reader.resume()
        error = reader.end()
        if error is None:
            assert reader.holds(1), "done with bytes of another use of the pages"
        else:
            ended(error, "lease-ended")
        assert owner.is_all(7)


def test_a_writer_is_fenced_by_an_owner_of_the_other_version(pair: tuple[Worker, Worker]) -> None:
    for owner, writer in itertools.permutations(pair):
        owner.set(0)
        writer.fill(2)
        lease = owner.grant("write")
        write = writer.write()
        owner.until_bytes_land()
        writer.stop()
        assert owner.revoke(lease) == "revoked"
        owner.set(7)
        writer.resume()
        if (error := writer.end(write)) is not None:
            ended(error, "lease-ended")
        # Bytes that were under way when the lease ended have arrived before what follows.
        writer.set(7)
        writer.grant("read")
        owner.read([0])
        assert owner.end() is None
        assert owner.is_all(7), "bytes landed after the fence"


@pytest.mark.parametrize("killed", [0, 1], ids=["caller", "called"])
@pytest.mark.parametrize("is_source", [True, False], ids=["source", "destination"])
def test_a_peer_of_the_other_version_is_killed(
    pair: tuple[Worker, Worker], transport: str, version: Make, killed: int, is_source: bool
) -> None:
    victim, survivor = pair[killed], pair[1 - killed]
    src, dst = (victim, survivor) if is_source else (survivor, victim)
    src.fill(1)
    incoming = dst.expect(b"request")
    lease = survivor.grant("read")
    write = src.write(notify=b"request", hold=True)
    src.release(2, write)
    dst.wait_layer(1, incoming)
    victim.kill()
    ended(survivor.end(incoming if is_source else write), *LOST)
    assert survivor.wait_lease(lease) == "peer-lost"
    for of in ("head", "older"):
        second = version(of, f"second-{of}", transport, LARGE)
        second.connect(survivor.address())
        second.fill(5)
        survivor.expect(b"again")
        second.write(notify=b"again")
        assert second.end() is None
        assert survivor.end() is None
        assert survivor.holds(5)
    survivor.wait_idle()


def test_without_a_protocol_in_common_both_ends_read_which_they_speak(transport: str, version: Make) -> None:
    head, apart = (version(of, of, transport) for of in ("head", "apart"))
    spoken = []
    for caller, called, where in ((head, apart, "at the peer"), (apart, head, "here")):
        with pytest.raises(PeerError) as refused:
            caller.connect(called.address())
        found = re.search(
            r"the peer speaks protocol version (\d+)(?: at most)?, this agent (\d+); upgrade kvxfer (.*)",
            str(refused.value),
        )
        assert found, refused.value
        assert found[3].startswith(where)
        spoken.append((int(found[1]), int(found[2])))
    assert spoken[0][0] < spoken[0][1]
    assert spoken[1] == spoken[0][::-1]


# ---- node by node -------------------------------------------------------------------------------


class Cluster:
    """Two prefill and two decode nodes, and requests between all pairs, each lane with its own blocks. The
    bytes of a served request are compared at the destination. Any other request must end in a typed error at
    every living end, and the lane continues with another pair; everything else is recorded in `wrong`.
    """

    NUM_LANES: Final = 4

    def __init__(self, make: Callable[..., Worker], transport: str) -> None:
        self._make, self._transport = make, transport
        self._seeds = itertools.count(1)
        self._seed_of: dict[Worker, int] = {}
        self._killed: set[Worker] = set()
        self._sessions: dict[tuple[Worker, Worker], int] = {}
        self._connecting = threading.Lock()
        self._news = threading.Condition()
        self._over = threading.Event()
        self.nodes: dict[str, Worker] = {}
        self.version_of: dict[Worker, str] = {}
        self.served: Counter[tuple[Worker, Worker]] = Counter()
        self.errors: list[KvxferError] = []
        self.wrong: list[BaseException] = []
        self._lanes = [threading.Thread(target=self._lane, args=(lane,)) for lane in range(self.NUM_LANES)]

    def start(self, name: str, version: str) -> None:
        """Starts a node that replaces the one of this name."""
        node = self._make(version, name, self._transport)
        node.fill(seed := next(self._seeds))
        self._seed_of[node], self.version_of[node] = seed, version
        self.nodes[name] = node

    def kill(self, name: str) -> None:
        node = self.nodes[name]
        self._killed.add(node)
        node.kill()

    def __enter__(self) -> Cluster:
        for lane in self._lanes:
            lane.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for lane in self._lanes:
            lane.join(2 * LONG_S)
        assert not any(lane.is_alive() for lane in self._lanes)

    def wait_until_served(self) -> None:
        """Waits until every current prefill node has served a request of every current decode node."""
        pairs = {(src, dst) for src in self._nodes("prefill") for dst in self._nodes("decode")}
        with self._news:
            came = self._news.wait_for(lambda: self.wrong or pairs <= (+self.served).keys(), 2 * LONG_S)
        assert not self.wrong, self.wrong
        assert came, f"not within {2 * LONG_S} s: {pairs - (+self.served).keys()}, {self.errors[-3:]}"

    def _nodes(self, kind: str) -> list[Worker]:
        return [node for name, node in self.nodes.items() if name.startswith(kind)]

    def _lane(self, lane: int) -> None:
        num_blocks = SMALL[2] // self.NUM_LANES
        ids = list(range(lane * num_blocks, (lane + 1) * num_blocks))
        # Sources change faster than destinations: a block never holds the expected bytes before they arrive.
        for attempt in itertools.count():
            if self._over.is_set():
                return
            src = self.nodes[f"prefill-{attempt % 2}"]
            dst = self.nodes[f"decode-{attempt // 2 % 2}"]
            try:
                is_served = self._serve(src, dst, b"%d-%d" % (lane, attempt), ids)
            except KvxferError as error:
                self.errors.append(error)
            except (EOFError, ConnectionError) as error:  # errors of the test's own socket to a process
                if not self._killed & {src, dst}:
                    self._fail(error)
            except BaseException as error:
                self._fail(error)
            else:
                with self._news:
                    self.served[src, dst] += is_served
                    self._news.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._over.set()
        with self._news:
            self.wrong.append(error)
            self._news.notify_all()

    def _serve(self, src: Worker, dst: Worker, tag: bytes, ids: list[int]) -> bool:
        peer = self._session(src, dst)
        incoming = dst.expect(tag, ids)
        try:
            write = src.write(ids, peer, notify=tag, hold=True)
            for layer in range(
                SMALL[0]
            ):  # paced like an engine's requests: most of the time a transfer is running
                src.release(layer + 1, write)
            error = src.end(write)
        except KvxferError as refused:
            error = refused
        except (EOFError, ConnectionError):  # it was killed: its router sees that no answer will come
            dst.cancel(incoming)
            self._note(dst.end(incoming))
            raise
        if self._note(error):
            dst.cancel(incoming)
        if self._note(dst.end(incoming)) or error:
            return False
        assert dst.holds(self._seed_of[src], ids), f"{tag!r} is done, and its bytes are others"
        return True

    def _note(self, error: KvxferError | None) -> bool:
        if error:
            self.errors.append(error)
        return error is not None

    def _session(self, src: Worker, dst: Worker) -> int:
        with self._connecting:
            known = self._sessions.get((src, dst))
            if known is None or src.peer_state(known)[0] != "open":
                known = self._sessions[src, dst] = src.connect(dst.address())
            return known


@pytest.mark.parametrize("stop", ["close", "kill"])
def test_node_by_node_under_load(transport: str, version: Make, stop: str) -> None:
    """To the new version and back: work at a node that stops ends in typed errors."""
    cluster = Cluster(version, transport)
    names = ("prefill-0", "decode-0", "prefill-1", "decode-1")
    for name in names:
        cluster.start(name, "older")
    with cluster:
        cluster.wait_until_served()
        for of in ("head", "older"):
            for name in names:
                if stop == "kill":
                    cluster.kill(name)
                else:
                    cluster.nodes[name].close()
                cluster.start(name, of)
                cluster.wait_until_served()
    assert not cluster.wrong, cluster.wrong
    versions = {(cluster.version_of[src], cluster.version_of[dst]) for src, dst in +cluster.served}
    assert versions == set(itertools.product(("head", "older"), repeat=2))
    print(f"{cluster.served.total()} served, {Counter(error.code for error in cluster.errors)}")
