"""Waits of streams for transfers, and their outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvxfer.handle import TransferState

if TYPE_CHECKING:
    from kvxfer._native import StreamWait as Wait

# In the order of native code's numbers.
_STATES: Final = (
    TransferState.PENDING,
    TransferState.DONE,
    TransferState.FAILED,
    TransferState.CANCELLED,
)


class StreamWait:
    """A stream's wait for a transfer, or for a layer of it; `kvxfer.Transfer.wait_in` makes one.

    The stream goes on in any case, even if the transfer fails or this object is dropped. Keep this object
    only as long as kernels read its `address`.
    """

    __slots__ = ("_wait",)

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __repr__(self) -> str:
        return f"<StreamWait {self.outcome}>"

    @property
    def outcome(self) -> TransferState:
        """``PENDING``, or the outcome with which the stream went on.

        ``DONE`` when the transfer or the layer is in place. For a layer it stays ``DONE`` even if other
        layers fail. With ``FAILED`` the transfer may still be pending: it ends when no byte can land any
        more.
        """
        return _STATES[self._wait.outcome]

    @property
    def address(self) -> int:
        """Address of the outcome for kernels after the wait: 4 bytes, 1 done, 2 failed, 3 cancelled.

        It is pinned memory; kernels may only read it. It is valid as long as this object exists, and is then
        reused for other waits.
        """
        return self._wait.address
