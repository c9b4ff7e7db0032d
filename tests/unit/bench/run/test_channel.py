import asyncio
import os
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


def test_objects_come_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    blocks = list(range(20_000))

    async def both() -> list[object]:
        sending = asyncio.to_thread(left.send, "long", blocks=blocks)
        received, _ = await asyncio.gather(right.receive_async(), sending)
        left.send("short", value=[2, "β"])
        return [received, right.receive(1.0)]

    assert asyncio.run(both()) == [{"kind": "long", "blocks": blocks}, {"kind": "short", "value": [2, "β"]}]


def test_descriptors_travel_along(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    reader, writer = os.pipe()
    left.send("take", (writer,))
    os.close(writer)
    right.receive(1.0)
    received = right.descriptors.popleft()
    os.write(received, b"x")
    assert os.read(reader, 1) == b"x"
    os.close(received)
    os.close(reader)


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
