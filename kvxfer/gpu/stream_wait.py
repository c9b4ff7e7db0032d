"""Streams that wait for transfers: what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvxfer.handle import TransferState

if TYPE_CHECKING:
    from kvxfer._native import StreamWait as Wait

# As native code counts them.
_STATES: Final = (
    TransferState.PENDING,
    TransferState.DONE,
    TransferState.FAILED,
    TransferState.CANCELLED,
)


class StreamWait:
    """A stream's wait for a transfer, or for a layer of it; `kvxfer.Transfer.wait_in` makes one.

    The stream goes on whatever becomes of the transfer and of this object. Keep it for as long as kernels
    read its `address`, and drop it otherwise.
    """

    __slots__ = ("_wait",)

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __repr__(self) -> str:
        return f"<StreamWait {self.outcome}>"

    @property
    def outcome(self) -> TransferState:
        """``PENDING``, or with what the stream went on.

        ``DONE`` when what was waited for is in place; a layer stays so whatever becomes of the others. With
        ``FAILED`` the transfer may be pending still: it ends when nothing can land any more.
        """
        return _STATES[self._wait.outcome]

    @property
    def address(self) -> int:
        """Where the outcome lies for kernels behind the wait: 4 bytes, 1 done, 2 failed, 3 cancelled.

        Pinned memory, to be read and not written, as long as this object is there: then it is another wait's.
        """
        return self._wait.address
