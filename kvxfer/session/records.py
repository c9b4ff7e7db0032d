"""Decodes native code's binary records of open and ended transfers into `Record`."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

from kvxfer.errors import CODE_NAMES

# native/core/record.h: the same fields in the same order. A test compares them.
_LAYOUT: Final = struct.Struct("<5Q4q5IH8B2x24s128s120s")
#: Bytes of a record.
RECORD_NBYTES: Final = _LAYOUT.size

Role = Literal["source", "destination", "expectation"]
Outcome = Literal["pending", "done", "failed", "cancelled"]

_ROLES: Final[tuple[Role, ...]] = ("source", "destination", "expectation")
_OUTCOMES: Final[tuple[Outcome, ...]] = ("pending", "done", "failed", "cancelled")
_CODES: Final = {name: number for number, name in CODE_NAMES.items()}
# native/core/transfer_states.h: TransferState.
_STATES: Final = (
    "queued",
    "parked",
    "requested",
    "moving",
    "serving",
    "failing",
    "cancelling",
    "finishing",
    "done",
    "failed",
    "cancelled",
)


class Record(NamedTuple):
    """One end of a transfer, or an expectation: its result, or its progress.

    The records of a transfer's two ends have the same ``transfer`` and each other's regions, and `ours` is
    true at one of them. Together with the incarnations of both agents these fields identify the transfer.
    Times are nanoseconds of this host's CLOCK_MONOTONIC; 0 means not yet, or unknown at this end.

    Attributes
    ----------
    session : int
        The agent's own number for the peer (``AgentCore.peer``); 0 for an expectation of any peer.
    transfer : int
        The transfer's number in its session; for an expectation, the same as `handle`.
    handle : int
        The number of the caller's handle at this end; 0 if there is none.
    ours : bool
        Whether it was posted at this end. True for expectations.
    region, remote_region : int
        Numbers of the regions at this end and at the other; 0 if unknown.
    outcome : str
        ``"pending"`` also after a failure, while copies still drain.
    code : str
        Why it failed or was cancelled (docs/errors.md), else ``""``.
    state : str
        State of its state machine: ``"parked"`` waits for a right, ``"queued"`` waits for room in its
        session. An open expectation is ``"moving"``.
    num_blocks : int
        Rows of its block tables (rows of units if the pages at both ends differ in size).
    num_pieces, pieces_done : int
        Its pieces, and the pieces that have arrived or were sent. If the peer fetches, a source knows of none
        before the end. 0 for an expectation.
    nbytes : int
        Bytes of the pages that it moves, as they cross a stream; 0 for an expectation.
    posted_ns : int
        When it was posted. If the peer posted it: when this end learned of it.
    begun_ns : int
        When its bytes could begin to move. At a destination: when its right was found. At a source: when the
        peer was told their location.
    first_piece_ns : int
        When the first piece arrived, or was sent.
    rails : tuple[str, ...]
        Names of the transports that carried it, as far as this end knows, cut to 24 bytes.
    context : str
        The request's context; the first 128 bytes.
    message : str
        Why it failed; the first 120 bytes.
    """

    session: int
    transfer: int
    handle: int
    ours: bool
    role: Role
    region: int
    remote_region: int
    outcome: Outcome
    code: str
    state: str
    priority: int
    num_blocks: int
    num_layers: int
    num_pieces: int
    pieces_done: int
    nbytes: int
    posted_ns: int
    begun_ns: int
    first_piece_ns: int
    ended_ns: int
    rails: tuple[str, ...]
    context: str
    message: str

    @property
    def nbytes_done(self) -> int:
        """Bytes that have moved, estimated from its pieces; all of them once it is done."""
        if self.outcome == "done":
            return self.nbytes
        return self.nbytes * self.pieces_done // max(1, self.num_pieces)


def decode(data: bytes) -> list[Record]:
    """Returns the records of ``AgentCore.take_records`` or ``open_transfers``, in their order.

    Raises ``ValueError`` if `data` is not a whole number of records.
    """
    if len(data) % RECORD_NBYTES:
        raise ValueError(f"{len(data)} bytes are not a whole number of records of {RECORD_NBYTES} bytes")
    return [_record(fields) for fields in _LAYOUT.iter_unpack(data)]


def encode(records: Iterable[Record]) -> bytes:
    """Returns records in native form, as `decode` reads them. Texts are cut to the field's size."""
    return b"".join(_LAYOUT.pack(*_fields(record)) for record in records)


def _fields(record: Record) -> tuple[Any, ...]:
    rails, context, message = (
        text.encode()[:nbytes]
        for text, nbytes in ((",".join(record.rails), 24), (record.context, 128), (record.message, 120))
    )
    return (
        *(record.transfer, record.handle, record.region, record.remote_region, record.nbytes),
        *(record.posted_ns, record.begun_ns, record.first_piece_ns, record.ended_ns, record.session),
        *(record.num_blocks, record.num_layers, record.num_pieces, record.pieces_done),
        _CODES[record.code] if record.code else 0,
        *(_ROLES.index(record.role), _OUTCOMES.index(record.outcome), _STATES.index(record.state)),
        *(record.priority, record.ours, len(rails), len(context), len(message), rails, context, message),
    )


def _record(fields: tuple[Any, ...]) -> Record:
    transfer, handle, region, remote_region, nbytes, posted, begun, first_piece, ended = fields[:9]
    session, num_blocks, num_layers, num_pieces, pieces_done, code, role, outcome, state = fields[9:18]
    priority, ours, rails_nbytes, context_nbytes, message_nbytes, rails, context, message = fields[18:]
    return Record(
        session=session,
        transfer=transfer,
        handle=handle,
        ours=bool(ours),
        role=_ROLES[role],
        region=region,
        remote_region=remote_region,
        outcome=_OUTCOMES[outcome],
        code=CODE_NAMES.get(code, "unknown") if code else "",
        state=_STATES[state],
        priority=priority,
        num_blocks=num_blocks,
        num_layers=num_layers,
        num_pieces=num_pieces,
        pieces_done=pieces_done,
        nbytes=nbytes,
        posted_ns=posted,
        begun_ns=begun,
        first_piece_ns=first_piece,
        ended_ns=ended,
        rails=tuple(_text(rails[:rails_nbytes]).split(",")) if rails_nbytes else (),
        context=_text(context[:context_nbytes]),
        message=_text(message[:message_nbytes]),
    )


def _text(cut: bytes) -> str:
    """Decodes a text that may be cut within a character, without the partial character."""
    return cut.decode(errors="ignore")
