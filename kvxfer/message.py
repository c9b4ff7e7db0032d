"""Bytes from agent to agent, with no transfer attached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kvxfer.peer import Peer

#: native/core/control/wire.h: kMaxMessage.
MAX_MESSAGE_NBYTES: Final = 64 * 1024


class Message(NamedTuple):
    """What a peer sent by ``peer.send``: in the order of its sending, apart from transfers and notifications.

    Attributes
    ----------
    peer
        Who sent it. One that was lost before this was read may have no name any more, where nobody
        holds it and 64 others were lost since.
    payload
        At most 65,536 bytes, as they were passed to ``send``.
    """

    peer: Peer
    payload: bytes
