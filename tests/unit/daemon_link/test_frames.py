"""Frames of the daemon's socket: whole however they are cut; bytes that are not frames are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvxfer.daemon_link.frames import (
    MAX_PAYLOAD_NBYTES,
    FrameKind,
    FrameReader,
    Malformed,
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


@pytest.mark.parametrize(
    "header", [b"\xff\xff\xff\xff\x00", (MAX_PAYLOAD_NBYTES + 1).to_bytes(4, "little") + b"\0", b"\1\0\0\0\2"]
)
def test_a_header_of_no_frame_is_refused_before_its_payload_comes(header: bytes) -> None:
    with pytest.raises(Malformed):
        next(FrameReader().feed(header))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"[]",
        b'"t"',
        b"{}",
        b'{"t": 1}',
        b'{"t": "state", "x": NaN}',
        b'{"t": "state", "x": -Infinity}',
        b"[" * 100_000,
        b'{"t": "state", "x": ' + b"9" * 5000 + b"}",
        json.dumps({"t": "state"}).encode()[:-1],
    ],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(Malformed):
        message_of(payload)


def test_nothing_is_sent_that_would_be_refused() -> None:
    assert len(frame(FrameKind.RECORDS, bytes(MAX_PAYLOAD_NBYTES))) == MAX_PAYLOAD_NBYTES + 5
    with pytest.raises(ValueError, match="longer"):
        frame(FrameKind.RECORDS, bytes(MAX_PAYLOAD_NBYTES + 1))
    with pytest.raises(ValueError, match="JSON"):
        json_frame({"t": "state", "x": float("nan")})
