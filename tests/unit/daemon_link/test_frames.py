"""Frames of the daemon's socket: whole however they are cut; bytes that are not frames are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.daemon_link.frames import (
    MAX_PAYLOAD_NBYTES,
    FrameKind,
    FrameReader,
    frame,
    json_frame,
    message_of,
)

SAID: list[dict[str, Any]] = [{"t": "hello", "name": "ä"}, {"t": "state", "rows": list(range(300))}]
STREAM = json_frame(SAID[0]) + frame(FrameKind.RECORDS, b"\0" * 700) + json_frame(SAID[1])


@pytest.mark.parametrize("step", [1, 4, 5, 6, 63, 700, len(STREAM)])
def test_frames_come_out_whole_however_they_were_cut(step: int) -> None:
    reader = FrameReader()
    found = [
        each for start in range(0, len(STREAM), step) for each in reader.feed(STREAM[start : start + step])
    ]
    assert [kind for kind, _ in found] == [FrameKind.JSON, FrameKind.RECORDS, FrameKind.JSON]
    assert [message_of(found[0][1]), message_of(found[2][1])] == SAID
    assert found[1][1] == b"\0" * 700


def test_who_stops_in_between_goes_on_later() -> None:
    reader = FrameReader()
    next(reader.feed(STREAM))
    assert [kind for kind, _ in reader.feed(b"")] == [FrameKind.RECORDS, FrameKind.JSON]


def test_nothing_is_sent_that_would_be_refused() -> None:
    assert len(frame(FrameKind.RECORDS, bytes(MAX_PAYLOAD_NBYTES))) == MAX_PAYLOAD_NBYTES + 5
    with pytest.raises(ValueError, match="longer"):
        frame(FrameKind.RECORDS, bytes(MAX_PAYLOAD_NBYTES + 1))
    with pytest.raises(ValueError, match="JSON"):
        json_frame({"t": "state", "x": float("nan")})
