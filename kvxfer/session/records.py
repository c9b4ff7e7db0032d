"""What native code keeps of transfers that have ended, or are open: binary records -> `Record`."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple

from kvxfer.errors import CODE_NAMES

# native/core/record.h: the same fields in the same order. Held to it by a test.
_LAYOUT: Final = struct.Struct("<5Q4q5IH8B2x24s128s120s")
#: Bytes of a record.
RECORD_NBYTES: Final = _LAYOUT.size

Role = Literal["source", "destination", "expectation"]
Outcome = Literal["pending", "done", "failed", "cancelled"]

_ROLES: Final[tuple[Role, ...]] = ("source", "destination", "expectation")
_OUTCOMES: Final[tuple[Outcome, ...]] = ("pending", "done", "failed", "cancelled")
_CODES: Final = {name: number for number, name in CODE_NAMES.items()}
# native/core/transfer.h: TransferState.
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
    """One end of a transfer, or an expectation: how it ended, or how far it is.

    The records of both ends of a transfer have the same ``transfer``, each other's regions, and `ours` true
    at one of them: with the incarnations of both agents these name it. Times are nanoseconds of this host's
    CLOCK_MONOTONIC, 0 for what has not happened or is not known at this end.

    Attributes
    ----------
    session : int
        The agent's own number of the peer (``AgentCore.peer``); of an expectation of any peer 0.
    transfer : int
        The transfer's number in its session; of an expectation `handle`.
    handle : int
        The number of its caller's handle at this end, 0 where it has none.
    ours : bool
        It was posted at this end. True of expectations.
    region, remote_region : int
        Numbers of the regions at this end and at the other; 0 where that is not known.
    outcome : str
        ``"pending"`` of what is open, and of what has failed and still drains.
    code : str
        Why it failed or was cancelled (docs/errors.md), else ``""``.
    state : str
        Of its state machine: ``"parked"`` waits for a right, ``"queued"`` for room in its session. Of an
        expectation ``"moving"`` while it is open.
    num_blocks : int
        Rows of its block tables (of units, where the pages at both ends differ in size).
    num_pieces, pieces_done : int
        Pieces that it falls into, and that have arrived, or were sent. A source whose peer fetches hears of
        none before the end. Of an expectation 0.
    nbytes : int
        Bytes of the pages that it moves, as they cross a stream; of an expectation 0.
    posted_ns : int
        When it was posted; of a transfer that the peer posted: when it was heard of.
    begun_ns : int
        When its bytes might begin to move: at a destination its right was found, at a source the peer was
        told where they are.
    first_piece_ns : int
        When the first piece had arrived, or was sent.
    rails : tuple[str, ...]
        Names of the transports that brought it, as far as this end knows and 24 bytes hold.
    context : str
        Whose request it is; the first 128 bytes.
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
        """Bytes that have moved, reckoned from its pieces; all of them once it is done."""
        if self.outcome == "done":
            return self.nbytes
        return self.nbytes * self.pieces_done // max(1, self.num_pieces)


def decode(data: bytes) -> list[Record]:
    """Returns the records of ``AgentCore.take_records`` or ``open_transfers``, in their order.

    Raises ``ValueError`` where `data` are no whole records.
    """
    if len(data) % RECORD_NBYTES:
        raise ValueError(f"{len(data)} bytes are no whole records of {RECORD_NBYTES}")
    return [_record(fields) for fields in _LAYOUT.iter_unpack(data)]


def encode(records: Iterable[Record]) -> bytes:
    """Returns records as native code has them: what `decode` reads. Texts are cut to what has room."""
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
        code=CODE_NAMES.get(code, f"code-{code}") if code else "",
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
    """What is whole of a text that may be cut within a character."""
    return cut.decode(errors="ignore")
