"""The same faults with different layouts at the two ends: runs are short, gathered and converted.

Transfers of 64 MiB between tokens before heads and heads before tokens, or between ranks that hold half of
the heads each. Held transfers are open when the fault comes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import PeerError, TransferError
from tests.fault.node import LARGE, SMALL, Local, Node, Remote, Worker, join, lost

LAYERS, KV, BLOCKS, TOKENS, HEADS, DIM = LARGE
TURNED = (LAYERS, KV, BLOCKS, HEADS, TOKENS, DIM)


def turned(node: Node, seed: int) -> np.ndarray:
    """What a node of shape TURNED holds when a peer of shape LARGE filled itself with a seed."""
    return np.stack([node.pattern(seed, layer).reshape(LARGE[1:]).swapaxes(2, 3) for layer in range(LAYERS)])


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_source_is_killed_in_the_middle_of_short_runs(
    transport: str, local: Local, remote: Remote, held: bool
) -> None:
    dst = local("survivor", transport, TURNED, "l2bhtd")
    src = remote("victim", transport, LARGE)
    src.fill(1)
    join(dst, src)
    src.grant("read")
    read = dst.read_until_bytes_land(held=held)
    src.kill()
    error = dst.end(read)
    if error is None and not held:
        assert np.array_equal(dst.array, turned(dst, 1))
    else:
        lost(error)
    second = remote("second", transport, LARGE)
    second.fill(7)
    join(dst, second)
    second.grant("read")
    dst.read()
    assert dst.end() is None
    assert np.array_equal(dst.array, turned(dst, 7))
    dst.wait_idle()


def test_nothing_lands_after_a_revoke_in_the_middle_of_short_runs(
    transport: str, local: Local, remote: Remote
) -> None:
    dst = local("survivor", transport, TURNED, "l2bhtd")
    src = remote("writer", transport, LARGE)
    src.fill(4)
    join(dst, src)
    dst.grant("write")
    src.write_all_but_the_last_layer()
    dst.until_bytes_land()
    dst.revoke()
    dst.set(9)
    src.release(LAYERS)
    error = src.end()
    assert isinstance(error, TransferError), error
    assert error.code in ("lease-ended", "not-permitted"), error
    for _ in range(50):
        dst.agent.poll()
    assert dst.is_all(9)


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_pages_that_are_read_under_an_ended_right_are_not_done(
    transport: str, local: Local, remote: Remote, held: bool
) -> None:
    dst = local("reader", transport, TURNED, "l2bhtd")
    src = remote("source", transport, LARGE)
    src.fill(5)
    join(dst, src)
    src.grant("read")
    read = dst.read_until_bytes_land(held=held)
    src.revoke()
    src.set(9)  # the pages are used again
    dst.let_go()
    error = dst.end(read)
    if error is None and not held:  # the read had ended before its lease did
        assert np.array_equal(dst.array, turned(dst, 5))
    else:
        assert isinstance(error, TransferError), error
        assert error.code == "lease-ended", error


def rank_of_two(remote: Remote, transport: str, dst: Node, rank: int) -> Worker:
    """A process with half of the destination's heads."""
    shape = (*SMALL[:4], SMALL[4] // 2, SMALL[5])
    held: dict[str, Any] = {"first_head": rank * shape[4], "total_heads": SMALL[4]}
    worker = remote(f"rank-{rank}", transport, shape, "l2bthd", held)
    worker.fill(10 + rank)
    join(dst, worker)
    return worker


def half(rank: int) -> np.ndarray:
    shape = (*SMALL[:4], SMALL[4] // 2, SMALL[5])
    with np.errstate(over="ignore"):
        words = np.arange(1, int(np.prod(shape)) // 4 + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15 + 2 * (10 + rank)
        )
    return words.view(np.uint16).reshape(shape)


def test_one_of_two_ranks_is_killed_and_what_was_expected_says_which_blocks(
    transport: str, local: Local, remote: Remote
) -> None:
    dst = local("decode", transport, SMALL)
    first, second = (rank_of_two(remote, transport, dst, rank) for rank in range(2))
    incoming = dst.expect(b"req")
    first.write(notify=b"req")
    assert first.end() is None
    second.write(notify=b"req", hold=True)
    second.release(2)
    dst.wait_layer(1, incoming)  # two layers from both sources have arrived
    assert dst.state(incoming) == "pending"
    second.kill()
    error = dst.end(incoming)
    assert isinstance(error, PeerError | TransferError), error
    assert sorted(error.failed_blocks.tolist()) == dst.all  # each lacks two layers of two heads
    middle = SMALL[4] // 2
    assert np.array_equal(dst.array[..., :middle, :], half(0))
    assert np.array_equal(dst.array[:2, ..., middle:, :], half(1)[:2])
    # A restarted rank sends the rest under a new tag.
    again = rank_of_two(remote, transport, dst, 1)
    incoming = dst.expect(b"again")
    first.write(notify=b"again")
    again.write(notify=b"again")
    assert dst.end(incoming) is None
    assert np.array_equal(dst.array[..., middle:, :], half(1))
    dst.wait_idle()


def test_a_rank_of_another_model_is_refused_and_the_others_go_on(
    transport: str, local: Local, remote: Remote
) -> None:
    dst = local("decode", transport, SMALL)
    other_model = remote("other", transport, SMALL, "l2bthd", {"total_heads": 2 * SMALL[4]})
    with pytest.raises(Exception, match="heads of the model"):
        other_model.connect(dst.address())
    first, second = (rank_of_two(remote, transport, dst, rank) for rank in range(2))
    incoming = dst.expect(b"req")
    first.write(notify=b"req")
    second.write(notify=b"req")
    assert dst.end(incoming) is None
