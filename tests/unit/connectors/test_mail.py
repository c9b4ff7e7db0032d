"""Notes between workers: in order, also to a worker that has not read for long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

import kvxfer
from kvxfer.connectors.common import mail, notes
from kvxfer.connectors.common.mail import Mail

BOUND_S = 30.0


class Ends:
    """Two workers' mail, and the session of the first with the second."""

    def __init__(self) -> None:
        self.agents = [kvxfer.Agent(name) for name in ("decode", "prefill")]
        self.decode, self.prefill = map(Mail, self.agents)
        self.to_prefill = self.agents[0].connect_blocking(self.agents[1].address, BOUND_S)

    def received(self, count: int) -> list[notes.Note]:
        """Reads so many notes, as steps of both engines do."""
        found: list[notes.Note] = []
        ends_at = time.monotonic() + BOUND_S
        while len(found) < count:
            # A step may bring nothing: room is told a little after it was made, and the next one sends.
            found += [note for _, note in self.prefill.receive(0.01)]
            assert time.monotonic() < ends_at, f"{len(found)} notes came and no more"
            self.decode.flush()
        return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for agent in made.agents:
        agent.close()


def receipt(number: int) -> notes.Note:
    return notes.Receipt(notes.digest_of("request"), number.to_bytes(16, "big"), 0, 1)


def test_what_finds_no_room_goes_later_and_in_order(ends: Ends) -> None:
    count = mail._MAX_WAITING + 200  # more than the unread ones, fewer than these and the waiting ones
    sent = [receipt(number) for number in range(count)]
    for note in sent:
        ends.decode.send(ends.to_prefill, note)
    assert ends.decode._waiting
    assert ends.received(count) == sent
    assert not ends.decode._waiting


def test_what_an_engine_that_never_reads_is_sent_is_bounded(
    ends: Ends, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail, "_MAX_WAITING", 8)
    for number in range(1000):
        ends.decode.send(ends.to_prefill, receipt(number))
    (waiting,) = ends.decode._waiting.values()
    assert len(waiting) == 8
    assert "prefill does not read its notes" in caplog.text


def test_nothing_is_kept_for_a_peer_that_is_gone(ends: Ends) -> None:
    for number in range(1000):
        ends.decode.send(ends.to_prefill, receipt(number))
    assert ends.decode._waiting
    ends.to_prefill.disconnect()
    ends.decode.flush()
    assert not ends.decode._waiting
    ends.decode.send(ends.to_prefill, receipt(1))
    assert not ends.decode._waiting
