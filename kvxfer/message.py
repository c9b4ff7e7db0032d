"""Bytes from agent to agent, with no transfer attached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kvxfer.peer import Peer

#: native/core/control/wire.h: kMaxMessage.
MAX_MESSAGE_NBYTES: Final = 64 * 1024


class Message(NamedTuple):
    """What a peer sent with ``peer.send``.

    Messages of one peer arrive in the order of sending, independent of transfers and notifications.

    Attributes
    ----------
    peer
        The sender. Its name may be gone if the peer was lost before this message was read, the program holds
        no reference to it, and 64 other peers were lost since.
    payload
        At most 65,536 bytes, as they were passed to ``send``.
    """

    peer: Peer
    payload: bytes
