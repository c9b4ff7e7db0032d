"""Connections between two processes are cut, half-closed, swallowed and delayed; strangers send garbage."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer.errors import PeerError
from tests.fault.node import BOUND_S, HASTY_S, LARGE, LOST, SECRET, Local, Node, Remote, footprint, lost
from tests.fault.proxy import Proxy
from tests.waiting import until


class Line:
    """A node here, one in another process, and a proxy between them; at most three TCP rails."""

    def __init__(
        self,
        local: Local,
        remote: Remote,
        delay_s: float = 0.0,
        shape: tuple[int, ...] = LARGE,
        **options: float,
    ) -> None:
        self.here = local("here", "tcp", shape, **options)
        self.there = remote("there", "tcp", shape, **options)
        self.there.fill(3)
        self.proxy = Proxy(self.there.address(), delay_s)
        self.here.connect(self.proxy.address)
        self.there.accept("here")

    def rails_up(self, count: int) -> None:
        """Waits for the rails at both ends, which learn of them at different times."""
        for end in (self.here, self.there):
            end.wait_rails(*["tcp"] * count)

    def wait_redialled(self, count: int) -> None:
        """Waits until so many rails are back at both ends."""
        for end in (self.here, self.there):
            end.wait_redialled(count)

    def still_works(self) -> None:
        """Both agents are usable: a direct session moves everything."""
        if self.here.peer_state()[0] == "open":
            self.here.disconnect()
        self.there.wait_lost()  # otherwise it might take the old session for the new one
        self.here.set(0)
        self.here.connect(self.there.address())
        self.there.accept("here")
        self.there.grant("read")
        self.here.read()
        assert self.here.end() is None
        assert self.here.holds(3)


@pytest.fixture
def line(local: Local, remote: Remote) -> Iterator[Callable[..., Line]]:
    lines: list[Line] = []

    def make(**options: float) -> Line:
        lines.append(Line(local, remote, **options))  # type: ignore[arg-type]
        return lines[-1]

    yield make
    for one in lines:
        one.proxy.close()


# ---- cut ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "half_close"])
def test_control_connection_is_cut(line: Callable[..., Line], how: str) -> None:
    """End of file in one direction ends a connection, too."""
    ends = line()
    ends.rails_up(2)
    ends.there.grant("read")
    lease = ends.here.grant("write")
    read = ends.here.read_until_bytes_land(held=True)
    getattr(ends.proxy.control, how)()
    lost(ends.here.end(read))
    assert ends.here.wait_lost() in LOST
    assert ends.there.wait_lost() in LOST
    assert ends.here.wait_lease(lease) == "peer-lost"
    ends.still_works()


@pytest.mark.parametrize("rail", [1, 2])
def test_one_rail_is_cut_and_the_other_carries_on(line: Callable[..., Line], rail: int, seed: int) -> None:
    ends = line()
    ends.rails_up(2)
    ends.there.grant("read")
    dying = ends.proxy.links[rail]
    # Within the 4 MiB that each rail is asked for at once, so that the cut happens however slow this rail is.
    dying.cut_after_nbytes = dying.passed_nbytes + random.Random(seed).randrange(1 << 16, 7 << 19)
    read = ends.here.read()
    assert ends.here.end(read) is None
    assert ends.here.holds(3)
    assert ends.here.peer_state() == ("open", "")
    stats = ends.here.stats()
    assert stats["rails_lost"] == 1, stats
    assert stats["pieces_redone"] > 0, stats
    assert stats["bytes_in"] >= ends.here.array.nbytes


def test_a_rail_that_was_cut_is_dialled_again_and_used(line: Callable[..., Line]) -> None:
    ends = line()
    ends.rails_up(2)
    ends.there.grant("read")
    ends.proxy.links[2].cut()
    ends.wait_redialled(1)
    ends.rails_up(2)
    again = ends.proxy.links[3]
    before = again.passed_nbytes
    ends.here.set(0)
    ends.here.read()
    assert ends.here.end() is None
    assert ends.here.holds(3)
    assert again.passed_nbytes > before
    assert ends.here.peer_state() == ("open", "")


def test_every_rail_is_cut(line: Callable[..., Line]) -> None:
    """The transfer ends; the agent decides whether the session survives without a rail."""
    ends = line()
    ends.rails_up(2)
    ends.there.grant("read")
    for link in ends.proxy.links[1:]:
        link.cut_after_nbytes = link.passed_nbytes + (8 << 20)
    read = ends.here.read(timeout_s=5.0)
    error = ends.here.end(read)
    assert error is not None
    assert len(error.failed_blocks)
    ends.still_works()


def test_traffic_is_swallowed(line: Callable[..., Line]) -> None:
    ends = line(silent_timeout_s=HASTY_S)
    ends.rails_up(2)
    ends.there.grant("read")
    ends.there.grant("write")
    write = ends.here.write(hold=True)
    read = ends.here.read_until_bytes_land(held=True)
    ends.proxy.blackhole()
    for work in (read, write):
        lost(ends.here.end(work), "peer-silent")
    assert ends.here.wait_lost() == "peer-silent"
    assert ends.there.wait_lost() == "peer-silent"
    ends.still_works()


@pytest.mark.parametrize("how", ["swallowed", "half-closed"])
def test_one_rail_is_silent(line: Callable[..., Line], how: str) -> None:
    """A rail that is silent while the session lives is given up, and the other rail moves the rest."""
    ends = line(silent_timeout_s=HASTY_S) if how == "swallowed" else line()
    ends.rails_up(2)
    ends.there.grant("read")
    read = ends.here.read_until_bytes_land(held=True)
    if how == "swallowed":
        ends.proxy.links[1].swallow = True
    else:
        ends.proxy.links[1].half_close()
    ends.here.let_go()
    assert ends.here.end(read) is None, "one rail was lost, and the other could have carried on"
    assert ends.here.holds(3)
    assert how == "half-closed" or ends.here.stats()["rails_lost"] > 0
    assert ends.here.peer_state() == ("open", "")
    ends.still_works()


def test_everything_comes_late(line: Callable[..., Line]) -> None:
    ends = line(delay_s=0.05, shape=(4, 2, 32, 32, 8, 128))
    ends.there.grant("read")
    ends.here.read(notify=b"late")
    assert ends.here.end() is None
    assert ends.here.holds(3)
    incoming = ends.there.expect(b"back")
    ends.here.fill(4)
    ends.here.write(notify=b"back")
    assert ends.here.end() is None
    assert ends.there.end(incoming) is None
    assert ends.there.holds(4)


# ---- trust --------------------------------------------------------------------------------------


def lines_of(caplog: pytest.LogCaptureFixture, node: Node) -> list[str]:
    """Returns what an agent logged by now."""
    node.agent.take_notification()
    return [record.getMessage() for record in caplog.records if record.name.startswith("kvxfer")]


def test_a_refused_stranger_is_one_line_in_the_log(
    local: Local, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvxfer")
    acceptor = local("acceptor", "tcp", secret=SECRET)
    stranger = remote("stranger", "tcp", secret=b"another secret, also long")
    with pytest.raises(PeerError):
        stranger.connect(acceptor.address())
    until(lambda: lines_of(caplog, acceptor), "no line")
    # No second line comes.
    time.sleep(0.2)
    assert len(lines_of(caplog, acceptor)) == 1, lines_of(caplog, acceptor)


# ---- bytes of strangers ---------------------------------------------------------------------------


def garbage(rng: random.Random, recorded: list[bytes]) -> bytes:
    """Returns random bytes, or recorded ones that are cut, corrupted, enlarged or unchanged."""
    kind = rng.randrange(5)
    base = bytearray(rng.choice(recorded))
    if kind == 0 or not base:
        return rng.randbytes(rng.randrange(1, 4096))
    if kind == 1:
        return bytes(base[: rng.randrange(len(base))])
    if kind == 2:
        for _ in range(rng.randrange(1, 8)):
            base[rng.randrange(len(base))] ^= 1 << rng.randrange(8)
        return bytes(base)
    if kind == 3:
        for i in range(min(4, len(base))):
            base[i] = 0xFF
        return bytes(base) + rng.randbytes(1 << 16)
    return bytes(base)


def throw(address: str, data: bytes, *, wait: bool) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), BOUND_S) as stranger:
        try:
            stranger.sendall(data)
            if wait:
                stranger.settimeout(0.02)
                stranger.recv(4096)
        except OSError:
            pass  # closed on us, or silent: both are fine


def test_bytes_of_strangers_disturb_nothing(line: Callable[..., Line], seed: int) -> None:
    rng = random.Random(seed)
    ends = line(handshake_timeout_s=HASTY_S)
    ends.rails_up(2)
    ends.there.grant("read")
    recorded = [bytes(link.sent) for link in ends.proxy.links]
    assert all(recorded)
    before, before_here = ends.there.footprint()[0], footprint()[0]
    addresses = ends.there.address(), ends.here.address()
    for _ in range(6):
        ends.here.set(0)
        read = ends.here.read_until_bytes_land(held=True)  # all of it arrives while they send
        for i in range(50):
            throw(addresses[i % 2], garbage(rng, recorded), wait=i % 3 == 0)
        assert ends.here.state(read) == "pending"
        ends.here.let_go()
        assert ends.here.end(read) is None
        assert ends.here.holds(3)
    assert ends.here.peer_state() == ("open", "")
    assert ends.there.peer_state() == ("open", "")
    # A stranger has handshake_timeout_s.
    until(lambda: ends.there.footprint()[0] <= before, "descriptors leaked there")
    until(lambda: footprint()[0] <= before_here, "descriptors leaked here")
    ends.still_works()


def test_strangers_that_say_nothing_are_sent_away(local: Local) -> None:
    node = local("patient", "tcp", handshake_timeout_s=1.0)
    before = footprint()[0]
    host, _, port = node.address().removeprefix("tcp://").rpartition(":")
    strangers = [socket.create_connection((host, int(port)), BOUND_S) for _ in range(50)]
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 16):  # until the node ends it; TimeoutError where it does not
                pass
    until(lambda: footprint()[0] <= before + 50, footprint)
    for stranger in strangers:
        stranger.close()
