"""Transfers between two processes that wait for a word to which a third process stores."""

from __future__ import annotations

import mmap
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import PeerError, TransferError
from tests.fault.node import BOUND_S, Local, Node, Remote, Worker
from tests.fork_server import Forked

# Maps the file and stores each number from its input as one aligned word.
STORES = """
import mmap, sys
import numpy as np
with open(sys.argv[1], "r+b") as file:
    word = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint32, 1)
    for line in sys.stdin:
        word[0] = int(line)
        print("stored", flush=True)
"""


class Device:
    """A process that stores to a word of this process without any notice, as a GPU would."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(mmap.PAGESIZE))
        with file.open("r+b") as opened:
            self.word = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.uint32, 1)
        self.process = Forked(STORES, str(file), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def store(self, value: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(value, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "stored\n"

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(BOUND_S)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path / "word")
    yield made
    made.end()


def paired(local: Local, remote: Remote, transport: str) -> tuple[Node, Worker]:
    """Returns a node of this process and one of another, which may write to each other."""
    here, there = local("here", transport), remote("there", transport)
    there.connect(here.address())
    here.accept("there")
    here.grant("write")
    there.grant("write")
    here.grant("read")
    there.grant("read")
    return here, there


def test_a_write_goes_layer_by_layer_as_another_process_stores(
    transport: str, local: Local, remote: Remote, device: Device
) -> None:
    src, dst = paired(local, remote, transport)
    src.fill(3)
    dst.expect(b"req")
    trigger = src.agent.trigger(device.word)
    write = src.write(notify=b"req", after=trigger.by_layer(5))
    device.store(4)
    assert dst.state() == "pending"
    assert dst.is_all(0)
    for layer in range(src.num_layers):
        device.store(5 + layer)
        dst.wait_layer(layer)
        assert dst.holds(3, layers=range(layer + 1))
        if layer + 1 < src.num_layers:
            assert src.state(write) == "pending"
    assert src.end(write) is None
    assert dst.end() is None


def test_a_read_waits_while_its_blocks_are_still_in_use(
    transport: str, local: Local, remote: Remote, device: Device
) -> None:
    dst, src = paired(local, remote, transport)
    src.fill(4)
    read = dst.read(after=dst.agent.trigger(device.word))
    dst.set(9)  # overwrites blocks that a transfer may still use
    assert src.stats()["transfers_open"] in (0, 1)
    assert dst.is_all(9)
    device.store(1)
    assert dst.end(read) is None
    assert dst.holds(4)


@pytest.mark.parametrize("write", [True, False])
def test_the_peer_is_killed_while_a_transfer_waits(
    transport: str, local: Local, remote: Remote, device: Device, write: bool
) -> None:
    survivor, victim = paired(local, remote, transport)
    survivor.set(7)
    verb: Any = survivor.write if write else survivor.read
    work = verb(after=survivor.agent.trigger(device.word))
    victim.kill()
    error = survivor.end(work)
    assert isinstance(error, PeerError | TransferError), error
    assert error.code in ("peer-lost", "peer-silent")
    device.store(1)
    assert survivor.is_all(7)
    survivor.wait_idle()
