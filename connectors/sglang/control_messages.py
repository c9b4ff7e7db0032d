"""The backend's messages over SGLang's control sockets, beside SGLang's own messages.

Each message has several frames: a guard, its kind, a JSON object, and block ids as arrays. Any host that
reaches the socket may send one. So every field has a type and a range, which the schemas below state once,
and no message grants a right. An agent accepts pages only from peers that have proven the secret, and only
into blocks that it named under a tag that only these peers know. `waiting_rooms` bounds what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.directory import Entry
from kvxfer.errors import invalid
from kvxfer.layout.schema import Field, Schema, flag, hexadecimal, integer_within, mapping, text_within
from kvxfer.naming import MAX_NAME_NBYTES

Ids = NDArray[np.uint32]

GUARD: Final = b"KVXFER"
TAG_NBYTES: Final = 16
_VERSION: Final = 1
_REGISTER: Final = b"register"
_ANSWER: Final = b"answer"
_PAGES: Final = b"pages"
_MAX_NBYTES: Final = 64 * 1024
# Bounds: a prompt has at most 2**22 pages, states included, and SGLang has a dozen kinds of states.
_MAX_IDS_NBYTES: Final = 16 * 1024 * 1024
_MAX_STATES: Final = 64
_MAX_NAMES: Final = 1024
# SGLang draws rooms from 0 to 2**63 - 1, and copies numbers of tokens to tensors of 64 bits.
_MAX_ROOM: Final = 2**63 - 1
_MAX_TOKENS: Final = 2**31 - 1
_MAX_RANKS: Final = 65535
_MAX_HOST_NBYTES: Final = 255  # of a name in the DNS
_MAX_REASON_NBYTES: Final = 4096

_name = text_within(MAX_NAME_NBYTES)  # of an agent or a region


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MAX_NAMES:
        raise ValueError(f"is not a list of at most {_MAX_NAMES} names")
    return tuple(map(_name, value))


def _tag(value: Any) -> bytes:
    tag = hexadecimal(value)
    if len(tag) != TAG_NBYTES:
        raise ValueError(f"has {len(tag)} bytes, not {TAG_NBYTES}")
    return tag


def _shortened(reason: str) -> str:
    return reason.encode(errors="replace")[:_MAX_REASON_NBYTES].decode(errors="ignore") or "no reason given"


@dataclass(frozen=True, slots=True)
class Registration:
    """Decode asks a prefill rank to open a session with its agent.

    Attributes
    ----------
    entry
        Decode's agent, as prefill dials it.
    endpoint, dst_port
        Decode's control socket.
    """

    agent: Entry
    endpoint: str
    dst_port: int

    def encode(self) -> list[bytes]:
        """Returns the frames."""
        return [GUARD, _REGISTER, _REGISTRATION.encode(self)]


@dataclass(frozen=True, slots=True)
class Answer:
    """A prefill rank could not open the session that it was asked for.

    Attributes
    ----------
    agent
        The rank's agent.
    reason
        Why it could not.
    """

    agent: str
    reason: str

    def encode(self) -> list[bytes]:
        """Returns the frames."""
        return [GUARD, _ANSWER, _ANSWERING.encode(self)]


@dataclass(frozen=True, slots=True)
class Destination:
    """The pages of one decode rank that a prefill rank is to fill for a request.

    Attributes
    ----------
    room
        SGLang's number of the request.
    endpoint, dst_port
        Decode's control socket; SGLang's code reports failures there.
    agent
        Decode's agent.
    tag
        The tag of this request's writes; each write appends the name of its region.
    aux_slot
        The slot in decode's metadata buffers.
    required_dst_info_num
        How many decode ranks name pages of this request to this rank.
    decode_prefix_len
        Tokens that decode has already; its pages come after them.
    is_dummy
        Whether this rank writes nothing, because another rank with the same data does.
    brings
        The regions that this rank is to write.
    pages
        Decode's pages, in the order of the prompt.
    states
        Block ids for each kind of state.
    """

    room: int
    endpoint: str
    dst_port: int
    agent: str
    tag: bytes
    aux_slot: int
    required_dst_info_num: int
    decode_prefix_len: int
    is_dummy: bool
    brings: tuple[str, ...]
    pages: Ids = field(default_factory=lambda: np.empty(0, np.uint32), compare=False)
    states: tuple[Ids, ...] = field(default=(), compare=False)

    def encode(self) -> list[bytes]:
        """Returns the frames."""
        ids = (self.pages, *self.states)
        return [GUARD, _PAGES, _DESTINATION.encode(self), *(each.tobytes() for each in ids)]

    @property
    def nbytes(self) -> int:
        """The size of its block ids."""
        return self.pages.nbytes + sum(each.nbytes for each in self.states)

    def tag_of(self, region: str) -> bytes:
        """Returns the tag of a write into a region."""
        return tag_of(self.tag, region)


def tag_of(tag: bytes, region: str) -> bytes:
    """Returns the tag of one request's writes into one region."""
    return tag + region.encode()


def read(frames: Sequence[bytes]) -> Registration | Answer | Destination:
    """Reads a message.

    Raises
    ------
    kvxfer.UsageError
        ``invalid-argument``: it is none of these messages, or lacks a field.
    """
    if len(frames) < 3:
        raise invalid(f"a control message has at least 3 frames, not {len(frames)}")
    match frames[1]:
        case b"register":
            values = _REGISTRATION.decode(frames[2], _MAX_NBYTES)
            return Registration(**{**values, "agent": Entry.from_dict(values["agent"])})
        case b"answer":
            return Answer(**_ANSWERING.decode(frames[2], _MAX_NBYTES))
        case b"pages":
            return _read_destination(frames)
        case _:
            raise invalid(f"a control message of kind {bytes(frames[1][:32])!r} is not known")


def ids_of(indices: Any) -> Ids:
    """Converts SGLang's block ids to an array; None becomes an empty one.

    Raises
    ------
    kvxfer.UsageError
        ``invalid-argument``: one of them is no block id.
    """
    ids = np.asarray([] if indices is None else indices).reshape(-1)
    if not len(ids):
        return np.empty(0, np.uint32)
    if ids.dtype.kind not in "iu":
        raise invalid(f"block ids are integers, not {ids.dtype.name}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > 0xFFFF_FFFF:
        raise invalid(f"block id {low if low < 0 else high} is not in 0 to {0xFFFF_FFFF}")
    return ids.astype(np.uint32)


def _read_destination(frames: Sequence[bytes]) -> Destination:
    values = _DESTINATION.decode(frames[2], _MAX_NBYTES)
    ids = frames[3:]
    if not 1 <= len(ids) <= 1 + _MAX_STATES:
        raise invalid(f"pages came with {len(ids)} arrays of block ids, not 1 to {1 + _MAX_STATES}")
    for each in ids:
        if len(each) % 4:
            raise invalid(f"an array of {len(each)} bytes is not an array of block ids")
    nbytes = sum(map(len, ids))
    if nbytes > _MAX_IDS_NBYTES:
        raise invalid(f"pages came with {nbytes} bytes of block ids, not at most {_MAX_IDS_NBYTES}")
    if values["is_dummy"] and (nbytes or values["brings"]):
        raise invalid("a rank that is to write nothing was told what to write")
    pages, *states = (np.frombuffer(each, np.uint32) for each in ids)
    return Destination(**values, pages=pages, states=tuple(states))


_ADDRESS: Final = (
    Field("endpoint", text_within(_MAX_HOST_NBYTES)),
    Field("dst_port", integer_within(1, 65535)),
)
_REGISTRATION: Final = Schema(
    "registration of a decode agent",
    "kvxfer_sglang",
    _VERSION,
    (Field("agent", mapping, write=Entry.to_dict), *_ADDRESS),
)
_ANSWERING: Final = Schema(
    "answer of a prefill rank",
    "kvxfer_sglang",
    _VERSION,
    (Field("agent", _name), Field("reason", text_within(_MAX_REASON_NBYTES), write=_shortened)),
)
_DESTINATION: Final = Schema(
    "pages of a request",
    "kvxfer_sglang",
    _VERSION,
    (
        Field("room", integer_within(0, _MAX_ROOM)),
        *_ADDRESS,
        Field("agent", _name),
        Field("tag", _tag, write=bytes.hex),
        Field("aux_slot", integer_within(0, 2**32 - 1)),
        Field("required_dst_info_num", integer_within(1, _MAX_RANKS)),
        Field("decode_prefix_len", integer_within(0, _MAX_TOKENS)),
        Field("is_dummy", flag),
        Field("brings", _names, write=list),
    ),
)
