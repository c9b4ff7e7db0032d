"""Holds registrations at a prefill worker until their request is there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydantic import ValidationError

import kvxfer
from kvxfer.connectors.common.notes import Leaving, RegistrationPart
from kvxfer.connectors.common.push_registration import Registration

# Bound for one peer, so that it cannot fill the memory: the size of the longest registration, in parts.
_MAX_NBYTES_OF_PEER: Final = 17 << 20
# Bound for all peers together; beyond it the peer with the most bytes gives way.
_MAX_NBYTES: Final = 64 << 20
# A note counts at least so many bytes, for the objects that hold it.
_LEAST_NBYTES: Final = 4096


class Arrival(NamedTuple):
    """The registration or the leaving of one reader of a push.

    Attributes
    ----------
    registration
        None if the reader left.
    may_be_shared
        Whether other engines may come after it.
    """

    peer: kvxfer.Peer
    reader: int
    num_readers: int
    registration: Registration | None
    may_be_shared: bool = False


@dataclass(slots=True)
class _Waiting:
    """The parts and arrivals for one key from one peer."""

    key: bytes
    peer: kvxfer.Peer
    expires_at: float
    parts: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by reader
    arrivals: list[tuple[int, Arrival]] = field(default_factory=list)  # with their order of arrival
    nbytes: int = 0


class Registrations:
    """Joins the parts of registrations, and keeps those that come before their request for a bounded time.

    Parameters
    ----------
    ttl_s
        How long they are kept.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._keys: dict[bytes, dict[int, _Waiting]] = {}  # for each key, by session
        self._peers: dict[int, dict[bytes, _Waiting]] = {}  # the same by session, in order of arrival
        self._nbytes: dict[int, int] = {}  # by session
        self._total_nbytes = 0
        self._num_arrived = 0

    def add(self, peer: kvxfer.Peer, note: RegistrationPart | Leaving) -> list[Arrival]:
        """Adds a note; returns the arrivals that were dropped to make room for it.

        Raises
        ------
        ValueError
            The registration cannot be read; its earlier parts are dropped.
        """
        waiting = self._peers.get(peer.id, {}).get(note.key)
        if waiting is None:
            waiting = _Waiting(note.key, peer, time.monotonic() + self._ttl_s)
            self._keys.setdefault(note.key, {})[peer.id] = waiting
            self._peers.setdefault(peer.id, {})[note.key] = waiting
        nbytes = _LEAST_NBYTES if isinstance(note, Leaving) else max(len(note.content), _LEAST_NBYTES)
        waiting.nbytes += nbytes
        self._nbytes[peer.id] = self._nbytes.get(peer.id, 0) + nbytes
        self._total_nbytes += nbytes
        forgotten = self._make_room(peer.id)
        if self._keys.get(note.key, {}).get(peer.id) is not waiting:
            return forgotten
        if isinstance(note, Leaving):
            self._arrived(waiting, Arrival(peer, note.reader, note.num_readers, None, note.may_be_shared))
            return forgotten
        parts = waiting.parts.setdefault(note.reader, {})
        parts[note.part] = note.content
        if len(parts) < note.num_parts:
            return forgotten
        del waiting.parts[note.reader]
        content = b"".join(part for _, part in sorted(parts.items()))
        try:
            registration = Registration.model_validate_json(content)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False, include_context=False)[:3]
            raise ValueError(f"a registration cannot be read: {found}") from None
        self._arrived(
            waiting,
            Arrival(peer, note.reader, note.num_readers, registration, registration.may_be_shared),
        )
        return forgotten

    def take(self, key: bytes) -> list[Arrival]:
        """Returns the arrivals for a key, each once, in order of arrival."""
        taken: list[tuple[int, Arrival]] = []
        for waiting in list(self._keys.get(key, {}).values()):
            taken += waiting.arrivals
            waiting.arrivals = []
            if not waiting.parts:
                self._drop(waiting)
        return [arrival for _, arrival in sorted(taken, key=lambda each: each[0])]

    def expire(self) -> None:
        """Drops entries that have waited too long."""
        now = time.monotonic()
        for of_peer in list(self._peers.values()):
            while of_peer and (waiting := next(iter(of_peer.values()))).expires_at <= now:
                self._drop(waiting)

    def _arrived(self, waiting: _Waiting, arrival: Arrival) -> None:
        self._num_arrived += 1
        waiting.arrivals.append((self._num_arrived, arrival))

    def _make_room(self, peer_id: int) -> list[Arrival]:
        """Drops this peer's oldest entries beyond its bound, then those of the peer with the most bytes."""
        forgotten: list[_Waiting] = []
        while self._nbytes.get(peer_id, 0) > _MAX_NBYTES_OF_PEER:
            forgotten.append(self._drop_oldest(peer_id))
        while self._total_nbytes > _MAX_NBYTES:
            forgotten.append(self._drop_oldest(max(self._nbytes, key=self._nbytes.__getitem__)))
        return [arrival for waiting in forgotten for _, arrival in waiting.arrivals]

    def _drop_oldest(self, peer_id: int) -> _Waiting:
        oldest = next(iter(self._peers[peer_id].values()))
        self._drop(oldest)
        return oldest

    def _drop(self, waiting: _Waiting) -> None:
        peer_id = waiting.peer.id
        del self._peers[peer_id][waiting.key], self._keys[waiting.key][peer_id]
        if not self._keys[waiting.key]:
            del self._keys[waiting.key]
        self._nbytes[peer_id] -= waiting.nbytes
        self._total_nbytes -= waiting.nbytes
        if not self._peers[peer_id]:
            del self._peers[peer_id], self._nbytes[peer_id]
