"""A small payload that arrives after the data that it names is visible."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvxfer.peer import Peer


class Notification(NamedTuple):
    """The ``notify`` payload of a transfer, delivered when every byte of the transfer is in place.

    Attributes
    ----------
    peer
        The peer that posted the transfer. Its name may be gone if the peer was lost before this notification
        was read, the program holds no reference to it, and 64 other peers were lost since.
    payload
        At most 4096 bytes, as they were passed to ``notify``.
    context
        The ``context`` that the poster gave the transfer, which names the request; ``""`` for none.
    """

    peer: Peer
    payload: bytes
    context: str = ""
