"""The base of handles, with which a caller awaits, cancels and inspects work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import KvxferError


class TransferState(StrEnum):
    """A transfer's state; all but ``PENDING`` are final. Each member equals its word.

    A transfer is ``CANCELLED`` at both ends, whichever end's program cancelled it.
    """

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Stages(NamedTuple):
    """When a transfer reached its stages, in nanoseconds of CLOCK_MONOTONIC; 0 for not yet.

    Attributes
    ----------
    posted_ns
        The call that made the handle.
    first_piece_ns
        The first piece in place; stays 0 at an end that does not receive.
    ended_ns
        The terminal state.
    """

    posted_ns: int
    first_piece_ns: int
    ended_ns: int


class Handle(ABC):
    """A handle on work: it reaches one terminal state, once and in bounded time; layers arrive before that.

    Dropping a handle neither cancels nor leaks anything. All methods may be called from any
    thread and any event loop.
    """

    __slots__ = ("__weakref__",)

    # ---- state ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def state(self) -> TransferState:
        """The work's state.

        It stays ``PENDING`` after a failure or a cancellation while a device makes copies that cannot be
        stopped. The pages are in use until these copies have ended.
        """

    @property
    def succeeded(self) -> bool:
        """Whether it ended with every byte in place at the destination."""
        return self.state is TransferState.DONE

    @property
    @abstractmethod
    def error(self) -> KvxferError | None:
        """Why it failed or was cancelled; None when done."""

    @property
    @abstractmethod
    def failed_blocks(self) -> NDArray[np.uint32]:
        """This end's block ids that the failure concerns; empty unless failed or cancelled.

        At the destination: blocks whose bytes cannot be relied on. At the source: blocks that may not have
        arrived; their bytes are intact, and may be sent again.
        """

    @property
    @abstractmethod
    def layers(self) -> range:
        """The layers that it moves, numbered model-wide."""

    @property
    @abstractmethod
    def rails(self) -> tuple[str, ...]:
        """Transports that moved its bytes, as seen at this end.

        Empty at the source where the destination copies, as over ``"shm"``. ``"eager"`` stands for bytes that
        were sent with the frame that announced them (`AgentOptions.eager_nbytes`).
        """

    @property
    @abstractmethod
    def stages(self) -> Stages:
        """When it reached its stages."""

    # ---- the end ----------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, None]:
        """Waits for the end.

        Cancelling the waiting task abandons only the waiting: the bytes go on moving, and the pages stay in
        use until the end. Call `cancel` to stop the work.

        Raises
        ------
        TransferError
            ``not-permitted``, ``lease-ended``, ``region-gone``, ``cancelled``, ``deadline``, ``integrity``,
            ``refused``, ``no-path``; ``failed_blocks`` names what to recompute.
        PeerError
            ``peer-lost``, ``peer-silent``, ``peer-restarted``, ``auth-failed``, ``protocol``: a peer is lost.
        AgentError
            ``closed`` when the agent closed first; ``forked`` in a child process.

        docs/errors.md explains each code.
        """
        return self._ended().__await__()

    async def _ended(self) -> None:
        await self._until_final()
        self._raise_if_failed()

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the end, driving progress from this thread; None waits without bound.

        Raises
        ------
        TimeoutError
            The time is over, and the work is still pending. It goes on: wait again, or cancel it.
        KvxferError
            The same errors as awaiting it.
        """
        if not self._final_by(timeout_s):
            raise TimeoutError(f"{self!r} is still pending after {timeout_s} s")
        self._raise_if_failed()

    @abstractmethod
    def cancel(self) -> None:
        """Requests the end of the work; does nothing if it has ended.

        The end comes later: wait for the handle before you reuse the pages.
        """

    # ---- layers -----------------------------------------------------------------------------

    @abstractmethod
    async def layer(self, layer: int) -> None:
        """Waits until every byte of one layer is in place, at the end that receives.

        Parameters
        ----------
        layer
            Numbered model-wide, one of `layers`. Layers may arrive in any order.

        Raises
        ------
        KvxferError
            The errors of awaiting the handle, if the work ended before this layer arrived.
        UsageError
            ``out-of-range`` for a layer that it does not move; ``unsupported`` if the other end receives.
        """

    @abstractmethod
    def layer_blocking(self, layer: int, timeout_s: float | None = None) -> None:
        """Blocks until one layer is in place: the blocking twin of `layer`.

        Raises
        ------
        TimeoutError
            The layer has not arrived in time.
        KvxferError
            The same errors as `layer`.
        """

    @abstractmethod
    def layer_arrived(self, layer: int) -> bool:
        """Returns whether every byte of one layer is in place, without waiting.

        Raises
        ------
        UsageError
            The same errors as `layer`.
        """

    # ---- inside -----------------------------------------------------------------------------

    @abstractmethod
    async def _until_final(self) -> None:
        """Waits until the state is final, whichever it is."""

    @abstractmethod
    def _final_by(self, timeout_s: float | None) -> bool:
        """Blocks until the state is final, and returns True, or until the time is over."""

    def _raise_if_failed(self) -> None:
        if (error := self.error) is not None:
            raise error
