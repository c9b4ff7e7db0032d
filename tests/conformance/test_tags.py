"""Writes and expectations that meet by a tag: errors name the request, and arrive at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions, Incoming, TransferError, TransferState, UsageError
from kvxfer.transfer import Transfer

# Deadline of waits that never succeed. There are none here: a test that waits this long has failed.
LONG_S = 60


class Ends:
    """Two agents; ``write`` and ``expect`` meet by a tag."""

    def __init__(self, prefill: Agent, decode: Agent) -> None:
        self.prefill, self.decode = prefill, decode
        self.source = prefill.register("kv", np.ones((4, 64), np.uint8))
        self.region = decode.register("kv", np.zeros((4, 64), np.uint8))
        self.remote = prefill.connect_blocking(decode.address, 10).region_blocking("kv")

    def write(self, tag: bytes, context: str | bytes = "") -> Transfer:
        return self.prefill.write(
            self.source, self.remote, [1], [2], notify=tag, timeout_s=LONG_S, context=context
        )

    def expect(self, tag: bytes, context: str | bytes = "", timeout_s: float = LONG_S) -> Incoming:
        return self.decode.expect(tag, [2], timeout_s=timeout_s, context=context)


@pytest.fixture(params=["loopback", "shm", "unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    options = AgentOptions(transports=(request.param,))
    with Agent("prefill", options=options) as prefill, Agent("decode", options=options) as decode:
        yield Ends(prefill, decode)


def ends_with(work: Transfer | Incoming, code: str, words: str, context: str) -> None:
    with pytest.raises(TransferError, match=words) as caught:
        work.wait(LONG_S / 2)
    assert (caught.value.code, caught.value.context) == (code, context), caught.value
    assert f"context {context}" in str(caught.value)


def all_is_heard(ends: Ends) -> None:
    """Waits until decode has read all of prefill's frames: they keep their order, so this write is last."""
    asked = ends.prefill.write(ends.source, ends.remote, [1], [2], context="x")
    ends_with(asked, "not-permitted", "no write lease", "x")


@pytest.mark.parametrize(
    ("of_write", "of_expect", "at_prefill", "at_decode"),
    [
        ("", "", "", ""),
        ("w-1", "", "w-1", "w-1"),
        ("", b"e-1", "e-1", "e-1"),
        (b"w-1", "e-\N{EURO SIGN}", "w-1", "e-\N{EURO SIGN}"),
    ],
)
def test_each_end_keeps_its_context_and_else_has_the_others(
    ends: Ends, of_write: str | bytes, of_expect: str | bytes, at_prefill: str, at_decode: str
) -> None:
    incoming = ends.expect(b"req", of_expect)
    transfer = ends.write(b"req", of_write)
    transfer.wait(LONG_S)
    incoming.wait(LONG_S)
    assert (transfer.context, incoming.context) == (at_prefill, at_decode)


def test_notifications_and_errors_say_whose_request(ends: Ends) -> None:
    peer = ends.decode.accept_blocking("prefill", 10)
    with ends.region.grant(peer, mode="write", ttl_s=LONG_S):
        ends.write(b"note", "w-1").wait(LONG_S)
        assert ends.decode.notification_blocking(LONG_S)[1:] == (b"note", "w-1")
    transfer = ends.prefill.write(ends.source, ends.remote, [1], [2], context="w-2", timeout_s=LONG_S)
    ends_with(transfer, "not-permitted", "no write lease", "w-2")
    late = ends.expect(b"late", "e-1", timeout_s=0.01)
    ends_with(late, "deadline", "had not arrived in full", "e-1")
    with pytest.raises(UsageError, match="block 9") as caught:
        ends.prefill.write(ends.source, ends.remote, [9], [2], context="w-3")
    assert caught.value.context == "w-3"
    for wrong in ("x" * 257, "\N{EURO SIGN}" * 86, b"\xff", "\ud800", 7, None):
        for verb in (ends.write, ends.expect):
            with pytest.raises(UsageError, match="context must be up to 256 bytes of UTF-8"):
                verb(b"tag", wrong)  # type: ignore[arg-type]


def test_a_write_of_a_tag_that_was_given_up_is_refused_at_once(ends: Ends) -> None:
    incoming = ends.expect(b"req", "e-1")
    incoming.cancel()
    ends_with(ends.write(b"req"), "cancelled", "the expectation of its tag had ended", "e-1")
    ends_with(ends.write(b"req", "w-1"), "cancelled", r"\(context 'e-1'\)", "w-1")
    with pytest.raises(TransferError):
        ends.expect(b"late", timeout_s=0.01).wait(LONG_S)
    ends_with(ends.write(b"late", "w-2"), "deadline", "had not arrived in full", "w-2")
    # A second expectation of the tag starts again.
    incoming, transfer = ends.expect(b"req"), ends.write(b"req")
    transfer.wait(LONG_S)
    incoming.wait(LONG_S)


def test_who_expects_a_write_that_was_cancelled_is_told_at_once(ends: Ends) -> None:
    transfer = ends.write(b"req", "w-1")
    transfer.cancel()
    ends.write(b"after").cancel()
    all_is_heard(ends)
    incoming = ends.expect(b"req")
    ends_with(incoming, "cancelled", "the write with its tag by 'prefill' had ended before", "w-1")
    assert incoming.state is TransferState.CANCELLED
    # The cancelled write was reported, so the tag can be used again.
    incoming = ends.expect(b"req")
    ends.write(b"req").wait(LONG_S)
    incoming.wait(LONG_S)
    # The same holds for a new write with the tag.
    transfer = ends.write(b"after")
    all_is_heard(ends)  # an earlier expectation would get the error of the previous write
    incoming = ends.expect(b"after")
    transfer.wait(LONG_S)
    incoming.wait(LONG_S)


def test_an_orderly_close_refuses_no_frames(ends: Ends) -> None:
    incoming = ends.expect(b"req")
    ends.write(b"req").wait(LONG_S)
    incoming.wait(LONG_S)
    for _ in range(3):
        ends.write(b"unread")
    ends.prefill.close()
    deadline = time.monotonic() + LONG_S
    while ends.decode.peers:
        assert time.monotonic() < deadline
        ends.decode.poll()
    assert ends.decode.stats()["frames_refused"] == 0
