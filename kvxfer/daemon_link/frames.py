"""Frames on the daemon's socket, in both directions: a header and a payload.

A frame is its payload's length (u32, little endian), its kind (u8), and the payload: one JSON object, with
its name under ``"t"``, or whole records (`kvxfer.session.records`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, Final, NoReturn

#: Protocol version. An end that receives another version reports it and ends the connection.
VERSION: Final = 1
#: Limit of the bytes that a stranger's header makes a process keep.
MAX_PAYLOAD_NBYTES: Final = 1 << 20

_HEADER: Final = struct.Struct("<IB")


class FrameKind(IntEnum):
    """The kind of a payload."""

    JSON = 0
    RECORDS = 1


class Malformed(ValueError):  # noqa: N818
    """The other end sent an invalid frame or message; end the connection."""


def frame(kind: FrameKind, payload: bytes) -> bytes:
    """Returns a frame.

    Raises
    ------
    ValueError
        The payload is longer than `MAX_PAYLOAD_NBYTES`.
    """
    if len(payload) > MAX_PAYLOAD_NBYTES:
        raise ValueError(f"a frame of {len(payload)} bytes is longer than {MAX_PAYLOAD_NBYTES}")
    return _HEADER.pack(len(payload), kind) + payload


def json_frame(message: Mapping[str, Any]) -> bytes:
    """Returns the frame of a JSON object; raises `ValueError` as `frame` does, or if it is not JSON."""
    try:
        text = json.dumps(message, separators=(",", ":"), allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"a message holds what is not JSON: {error}") from None
    return frame(FrameKind.JSON, text.encode())


class FrameReader:
    """Cuts received bytes into frames; keeps less than one frame.

    Parameters
    ----------
    piece_nbytes
        A longer frame of records is yielded in pieces of this many bytes.
    """

    def __init__(self, piece_nbytes: int = MAX_PAYLOAD_NBYTES) -> None:
        self._piece_nbytes = piece_nbytes
        self._left = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """Yields the complete frames. If the caller stops early, the next call yields the rest.

        Raises
        ------
        Malformed
            A header has an unknown kind or too long a payload. Nothing more can be read.
        """
        self._left += data
        while len(self._left) >= _HEADER.size:
            nbytes, number = _HEADER.unpack_from(self._left)
            if nbytes > MAX_PAYLOAD_NBYTES:
                raise Malformed(
                    f"a frame of {nbytes} bytes was announced, {MAX_PAYLOAD_NBYTES} at most are taken"
                )
            try:
                kind = FrameKind(number)
            except ValueError:
                raise Malformed(f"a frame of kind {number} came, which there is not") from None
            end = _HEADER.size + nbytes
            if len(self._left) < end:
                return
            if kind is FrameKind.RECORDS and nbytes > self._piece_nbytes:
                # The rest of it becomes a frame.
                end = _HEADER.size + self._piece_nbytes
                payload = bytes(self._left[_HEADER.size : end])
                del self._left[: self._piece_nbytes]
                _HEADER.pack_into(self._left, 0, nbytes - self._piece_nbytes, kind)
            else:
                payload = bytes(self._left[_HEADER.size : end])
                del self._left[:end]
            yield kind, payload


def message_of(payload: bytes) -> dict[str, Any]:
    """Returns the JSON object of a frame, which must have a text under ``"t"``.

    Raises
    ------
    Malformed
        It is none.
    """
    try:
        message = json.loads(payload, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a frame holds no JSON: {type(error).__name__}") from None
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise Malformed('a frame holds no JSON object with a text under "t"')
    return message


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
