"""Dials in a bounded number of threads: those that wait are bounded, too."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("pydantic")

import kvxfer
from kvxfer.connectors.common import dialling
from kvxfer.connectors.common.dialling import Diallers
from kvxfer.directory import Entry


def test_dials_beyond_the_bound_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "_MAX_WAITING", 5)
    answers = threading.Event()
    peer: Any = object()

    def connect(rank: Entry) -> Any:
        answers.wait()
        return peer

    diallers = Diallers(connect, 600.0)
    rank = Entry("p/0.1", "tcp://10.0.0.7:1", bytes(16))
    # One request may use so many threads at one host.
    num_kept = dialling._MOST_OF_REQUEST_AT_HOST + 5
    dials = [diallers.dial(rank, "request") for _ in range(num_kept + 3)]
    try:
        for dial in dials[num_kept:]:
            with pytest.raises(kvxfer.PeerError, match="too many other dials wait"):
                dial.result(0)
        assert not any(dial.done() for dial in dials[:num_kept])
    finally:
        answers.set()
    assert all(dial.result() is peer for dial in dials[:num_kept])
    # There is room again.
    assert diallers.dial(rank, "request").result() is peer
    diallers.close()
