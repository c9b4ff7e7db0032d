import socket
from collections.abc import Iterator

import pytest

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.run.channel import Channel


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    left, right = Channel(ours, "right"), Channel(theirs, "left")
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("kind", [BenchError, CheckFailedError])
def test_errors_are_raised_at_the_other_end(pair: tuple[Channel, Channel], kind: type[BenchError]) -> None:
    left, right = pair
    left.send_error(kind("byte 3 is wrong"))
    with pytest.raises(kind, match="left: byte 3 is wrong"):
        right.receive(1.0)


def test_silence_and_the_end_of_the_peer_are_errors(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    with pytest.raises(BenchError, match=r"right process sent nothing for 0\.01 s"):
        left.receive(0.01)
    right.close()
    with pytest.raises(BenchError, match="right process"):
        left.receive(1.0)
