"""A small payload that arrives after the data that it names is visible."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvxfer.peer import Peer


class Notification(NamedTuple):
    """What a transfer carried as ``notify``, delivered when every byte of it was in place.

    Attributes
    ----------
    peer
        Who posted the transfer. One that was lost before this was read may have no name any more,
        where nobody holds it and 64 others were lost since.
    payload
        At most 4096 bytes, as they were passed to ``notify``.
    context
        Whose request it was, as its poster said by ``context``; ``""`` for none.
    """

    peer: Peer
    payload: bytes
    context: str = ""
