"""Registrations at a prefill worker, until the request that they are for is there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydantic import ValidationError

import kvxfer
from kvxfer.connectors.common.notes import Leaving, RegistrationPart
from kvxfer.connectors.common.push_registration import Registration

# Of all that wait, so that peers cannot fill the memory; the least that a note counts, for what keeps it.
_MAX_NBYTES: Final = 64 << 20
_LEAST_NBYTES: Final = 4096


class Arrival(NamedTuple):
    """A reader of a push, as it came in.

    Attributes
    ----------
    registration
        None of one that left.
    """

    peer: kvxfer.Peer
    reader: int
    num_readers: int
    registration: Registration | None


@dataclass(slots=True)
class _Waiting:
    """What came for one key."""

    expires_at: float
    parts: dict[tuple[int, int], dict[int, bytes]] = field(default_factory=dict)  # by session and reader
    arrivals: list[Arrival] = field(default_factory=list)
    nbytes: int = 0


class Registrations:
    """Puts parts together, and keeps what came before its request for a bounded time.

    Parameters
    ----------
    ttl_s
        How long.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._waiting: dict[bytes, _Waiting] = {}
        self._nbytes = 0

    def add(self, peer: kvxfer.Peer, note: RegistrationPart | Leaving) -> None:
        """Takes a note in.

        Raises
        ------
        ValueError
            It cannot be read; what came of it before is dropped.
        """
        waiting = self._waiting.get(note.key)
        if waiting is None:
            waiting = self._waiting[note.key] = _Waiting(time.monotonic() + self._ttl_s)
        nbytes = _LEAST_NBYTES if isinstance(note, Leaving) else max(len(note.content), _LEAST_NBYTES)
        waiting.nbytes += nbytes
        self._nbytes += nbytes
        while self._nbytes > _MAX_NBYTES:
            self._drop(next(iter(self._waiting)))
        if isinstance(note, Leaving):
            waiting.arrivals.append(Arrival(peer, note.reader, note.num_readers, None))
            return
        source = (peer.id, note.reader)
        parts = waiting.parts.setdefault(source, {})
        parts[note.part] = note.content
        if len(parts) < note.num_parts:
            return
        del waiting.parts[source]
        content = b"".join(part for _, part in sorted(parts.items()))
        try:
            registration = Registration.model_validate_json(content)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False, include_context=False)[:3]
            raise ValueError(f"a registration cannot be read: {found}") from None
        waiting.arrivals.append(Arrival(peer, note.reader, note.num_readers, registration))

    def take(self, key: bytes) -> list[Arrival]:
        """Returns who is there for a key, each once, in the order of their coming."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return []
        arrivals, waiting.arrivals = waiting.arrivals, []
        if not waiting.parts:
            self._drop(key)
        return arrivals

    def expire(self) -> None:
        """Forgets what has waited too long."""
        now = time.monotonic()
        while self._waiting:
            key, waiting = next(iter(self._waiting.items()))
            if waiting.expires_at > now:
                return
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._nbytes -= self._waiting.pop(key).nbytes
