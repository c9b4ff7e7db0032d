"""The notes that workers of two engines exchange, as messages between their agents.

Every note is about one request. It names the request by its lease, key or tag, which only the engines that
were given the request know. Parsing a stranger's bytes is safe.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import ClassVar, Final

KEY_NBYTES: Final = 16
# An agent's message has at most 65,536 bytes, and a note's head a few dozen.
_PART_NBYTES: Final = 65_000
_MAX_PARTS: Final = 256
# Workers of one engine. Prefill keeps something for each.
_MAX_WORKERS: Final = 1024
_MAX_REASON_NBYTES: Final = 4000
_MAX_CONTEXT_NBYTES: Final = 256  # the context of a transfer
_MAX_RECORD_NBYTES: Final = 128  # the part of it that the transfer's record keeps


@dataclass(frozen=True, slots=True)
class Receipt:
    """A reader is done with a request that it fetched, or does not want it.

    With `may_be_shared`, other engines may read the request too.
    """

    FORM: ClassVar = struct.Struct("<B16s16sHH")
    KIND: ClassVar = 1
    SHARED_KIND: ClassVar = 6

    request: bytes  # see `digest_of`
    first_lease: bytes  # `digest_of` the text of the lease's token
    reader: int
    num_readers: int
    may_be_shared: bool = False

    def encode(self) -> bytes:
        """Returns the message."""
        kind = self.SHARED_KIND if self.may_be_shared else self.KIND
        return self.FORM.pack(kind, self.request, self.first_lease, self.reader, self.num_readers)


@dataclass(frozen=True, slots=True)
class RegistrationPart:
    """A part of a `Registration`, because the registration of a long prompt exceeds one message."""

    FORM: ClassVar = struct.Struct("<B16sHHHH")
    KIND: ClassVar = 2

    key: bytes
    reader: int
    num_readers: int
    part: int
    num_parts: int
    content: bytes

    def encode(self) -> bytes:
        """Returns the message."""
        head = self.FORM.pack(self.KIND, self.key, self.reader, self.num_readers, self.part, self.num_parts)
        return head + self.content

    @classmethod
    def split(cls, key: bytes, reader: int, num_readers: int, content: bytes) -> list[RegistrationPart]:
        """Returns the parts of an encoded registration."""
        pieces = [content[at : at + _PART_NBYTES] for at in range(0, len(content), _PART_NBYTES)]
        return [cls(key, reader, num_readers, at, len(pieces), piece) for at, piece in enumerate(pieces)]


@dataclass(frozen=True, slots=True)
class Leaving:
    """A reader does not want a push, or no longer wants it; `may_be_shared` is as in `Receipt`."""

    FORM: ClassVar = struct.Struct("<B16sHH")
    KIND: ClassVar = 3
    SHARED_KIND: ClassVar = 7

    key: bytes
    reader: int
    num_readers: int
    may_be_shared: bool = False

    def encode(self) -> bytes:
        """Returns the message."""
        kind = self.SHARED_KIND if self.may_be_shared else self.KIND
        return self.FORM.pack(kind, self.key, self.reader, self.num_readers)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Prefill will not push the request that a reader registered for."""

    FORM: ClassVar = struct.Struct("<B16s")
    KIND: ClassVar = 4

    tag: bytes
    reason: str

    def encode(self) -> bytes:
        """Returns the message."""
        return self.FORM.pack(self.KIND, self.tag) + self.reason.encode(errors="replace")[:_MAX_REASON_NBYTES]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A reader's engine knows a request; prefill restarts the request's keep time.

    For a push, `request` is its key and `first_lease` is zeros.
    """

    FORM: ClassVar = struct.Struct("<B16s16sB")
    KIND: ClassVar = 5

    request: bytes  # see `digest_of`
    first_lease: bytes
    is_reading: bool

    def encode(self) -> bytes:
        """Returns the message."""
        return self.FORM.pack(self.KIND, self.request, self.first_lease, self.is_reading)


Note = Receipt | RegistrationPart | Leaving | Refusal | Heartbeat


def read(payload: bytes) -> Note:
    """Returns the note in a message.

    Raises
    ------
    ValueError
        The message is not a valid note.
    """
    try:
        match payload[:1]:
            case b"\x01" | b"\x06":
                receipt = Receipt(*Receipt.FORM.unpack(payload)[1:])
                _check_reader(receipt)
                return replace(receipt, may_be_shared=payload[0] == Receipt.SHARED_KIND)
            case b"\x02":
                head = RegistrationPart.FORM
                part = RegistrationPart(*(*head.unpack_from(payload)[1:], payload[head.size :]))
                if part.part >= part.num_parts or part.num_parts > _MAX_PARTS:
                    raise ValueError(f"part {part.part} of {part.num_parts}")
                _check_reader(part)
                return part
            case b"\x03" | b"\x07":
                leaving = Leaving(*Leaving.FORM.unpack(payload)[1:])
                _check_reader(leaving)
                return replace(leaving, may_be_shared=payload[0] == Leaving.SHARED_KIND)
            case b"\x04":
                head = Refusal.FORM
                reason = payload[head.size :][:_MAX_REASON_NBYTES].decode(errors="replace")
                return Refusal(*(*head.unpack_from(payload)[1:], reason))
            case b"\x05":
                _, request, first_lease, is_reading = Heartbeat.FORM.unpack(payload)
                if is_reading > 1:
                    raise ValueError(f"a claim with is_reading {is_reading}, not 0 or 1")
                return Heartbeat(request, first_lease, bool(is_reading))
    except struct.error as error:
        raise ValueError(f"{len(payload)} bytes of kind {payload[0]}: {error}") from None
    raise ValueError(f"{len(payload)} bytes that begin with {payload[:1].hex() or 'nothing'}")


def _check_reader(note: Receipt | RegistrationPart | Leaving) -> None:
    if not note.reader < note.num_readers <= _MAX_WORKERS:
        raise ValueError(f"worker {note.reader} of {note.num_readers}, not of 1 to {_MAX_WORKERS}")


def context_of(request_id: str, trace: str = "") -> str:
    """Returns the context that errors and logs at both ends show for a request's transfers.

    It is the request's id, cut if it is long, and its trace. With a trace the id is cut further, so that both
    fit into a transfer's record, which keeps less than the context.
    """
    if not trace:
        return _beginning(request_id, _MAX_CONTEXT_NBYTES)
    return f"{_beginning(request_id, _MAX_RECORD_NBYTES - len(trace) - 1)} {trace}"


def _beginning(text: str, nbytes: int) -> str:
    return text.encode(errors="replace")[: max(0, nbytes)].decode(errors="ignore")


def digest_of(name: str) -> bytes:
    """Returns the digest by which notes name a request or a lease."""
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()
