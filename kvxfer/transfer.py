"""Handles: a posted transfer, and what a receiver expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer._native import NativeError
from kvxfer.arguments import bound, count
from kvxfer.errors import KvxferError, UsageError, from_code, invalid, translate
from kvxfer.handle import Handle, Stages, TransferState

if TYPE_CHECKING:
    from kvxfer._native import Handle as NativeHandle
    from kvxfer.gpu.stream_wait import StreamWait
    from kvxfer.region import Region
    from kvxfer.session.completion import Completions, Key

_MOST: Final = 2**32 - 1


# A lookup here costs a fraction of a call of the class, and every read of a state needs one.
_STATES: Final = {state.value: state for state in TransferState}
_PENDING: Final = TransferState.PENDING


class Scope(NamedTuple):
    """What all work on the same layers of the same two regions has in common.

    Attributes
    ----------
    completions
        Of the agent.
    peer_name
        Name of the peer at the other end; ``""`` for any peer.
    layers
        Layers that move, numbered model-wide.
    origin
        The layer that the native handle calls 0.
    arrives
        Whether this end receives.
    region
        The region at this end.
    """

    completions: Completions
    peer_name: str
    layers: range
    origin: int
    arrives: bool
    region: Region


class Work(Handle):
    """Work that the native core knows: the common part of `Transfer` and `Incoming`."""

    __slots__ = ("_handle", "_scope")

    def __init__(self, handle: NativeHandle, scope: Scope) -> None:
        self._handle = handle
        self._scope = scope

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._handle.id}{self._tag_words()} "
            f"peer={self._scope.peer_name or 'any'} "
            f"layers={self.layers.start}..{self.layers.stop - 1} {self.state}>"
        )

    def _tag_words(self) -> str:
        return ""

    # ---- state ------------------------------------------------------------------------------

    @property
    def state(self) -> TransferState:
        return _STATES[self._handle.state]

    @property
    def error(self) -> KvxferError | None:
        """Why it failed or was cancelled; None while pending and when done."""
        if self.state in (TransferState.PENDING, TransferState.DONE):
            return None
        return from_code(
            self._handle.code,
            self._handle.message,
            peer=self._scope.peer_name,
            rail=",".join(self._handle.rails),
            context=self._handle.context,
            failed_blocks=self._handle.failed_blocks,
        )

    @property
    def context(self) -> str:
        """The request that it belongs to: this end's ``context``, or else the other end's, once known.

        A write learns its destination's context when it ends. An `Incoming` without a context of its own
        shows that of the last writer; after a failure, that of the writer that failed.
        """
        return self._handle.context

    @property
    def failed_blocks(self) -> NDArray[np.uint32]:
        return self._handle.failed_blocks

    @property
    def region(self) -> Region:
        """This end's region: the source or the destination of its bytes."""
        return self._scope.region

    @property
    def layers(self) -> range:
        return self._scope.layers

    @property
    def rails(self) -> tuple[str, ...]:
        return self._handle.rails

    @property
    def stages(self) -> Stages:
        return Stages(self._handle.posted_ns, self._handle.first_piece_ns, self._handle.ended_ns)

    # ---- the end ----------------------------------------------------------------------------

    def cancel(self) -> None:
        self._scope.completions.check()
        self._handle.cancel()

    # ---- layers -----------------------------------------------------------------------------

    async def layer(self, layer: int) -> None:
        index = self._index(layer)
        self._scope.completions.check()
        if not self._handle.watch_layer(index):
            await self._scope.completions.until(
                self._key, lambda: self._handle.layer_arrived(index) or self._is_final(), part=index
            )
        self._raise_unless_arrived(index)

    def layer_blocking(self, layer: int, timeout_s: float | None = None) -> None:
        index = self._index(layer)
        if not self._layer_by(index, timeout_s):
            raise TimeoutError(f"layer {layer} of {self!r} has not arrived after {timeout_s} s")
        self._raise_unless_arrived(index)

    def layer_arrived(self, layer: int) -> bool:
        return self._handle.layer_arrived(self._index(layer))

    # ---- streams ----------------------------------------------------------------------------

    def wait_in(self, stream: Any, layer: int | None = None) -> StreamWait:
        """Makes a stream of the agent's GPU wait for the end, or for a layer; the caller does not wait.

        Work that is enqueued in the stream after this call runs when the bytes are in place, and sees them.
        It also runs if the transfer fails, at its deadline at the latest. So check the handle (`error`,
        `wait`) before you use the results, or let kernels read `StreamWait.address`. When the stream goes on,
        blocks of a failed transfer may still be in use: reuse them only when the handle has ended, as always.

        Parameters
        ----------
        stream
            A torch or cuda.core stream of the agent's GPU, not one that is being captured. The transfer may
            also move host memory.
        layer
            One of `layers`, at the end that receives; None for the end of the transfer.

        Raises
        ------
        UsageError
            ``unsupported``: the agent has no GPU, its driver does not support streams that wait for memory,
            or a layer was named but the other end receives. ``invalid-argument``: `stream` is not a stream,
            is of another GPU, or is being captured (a graph runs later or many times, but a transfer ends
            once). ``out-of-range``: a layer that it does not move.
        AgentError
            ``system``: the device has failed. ``closed``: the agent is closed.

        Notes
        -----
        One driver call (``cuStreamWaitValue32``). The agent's thread stores the word that the stream waits
        for, so nothing may delay that thread: its work on the device, above all its copies, must not be
        queued behind this stream. If the transfer in turn waits for this stream (``after=``), both are stuck
        until the transfer's deadline.
        """
        from kvxfer.gpu import streams
        from kvxfer.gpu.stream_wait import StreamWait

        handle = streams.handle_of(stream)
        if handle is None:
            raise invalid(
                f"a torch or cuda.core stream can wait for a transfer, not a {type(stream).__name__}"
            )
        index = None if layer is None else self._index(layer)
        self._scope.completions.check()
        if self._handle.gpu >= 0:
            streams.check_device(stream, self._handle.gpu)
        try:
            return StreamWait(self._handle.wait_in(handle, index))
        except NativeError as error:
            raise translate(error, peer=self._scope.peer_name) from None

    # ---- inside -----------------------------------------------------------------------------

    @property
    def _key(self) -> Key:
        """Key of its events."""
        return "handle", self._handle.id

    def _index(self, layer: int) -> int:
        if not self._scope.arrives:
            raise UsageError(
                "layers arrive at the other end of a write: wait for the whole transfer here, "
                "or for layers of agent.expect() there",
                code="unsupported",
            )
        if type(layer) is not int:
            layer = count(layer, "layer", 0, _MOST)
        if layer not in self.layers:
            raise UsageError(
                f"layer {layer} is not among layers {self.layers.start} to {self.layers.stop - 1} of "
                "this transfer (numbered model-wide)",
                code="out-of-range",
            )
        return layer - self._scope.origin

    def _is_final(self) -> bool:
        return _STATES[self._handle.state] is not _PENDING

    async def _until_final(self) -> None:
        await self._scope.completions.until(self._key, self._is_final)

    def _final_by(self, timeout_s: float | None) -> bool:
        return self._by(self._handle.wait, timeout_s)

    def _layer_by(self, index: int, timeout_s: float | None) -> bool:
        return self._by(lambda left_s: self._handle.wait_layer(index, left_s), timeout_s)

    def _by(self, wait: Callable[[float], bool], timeout_s: float | None) -> bool:
        limit_s = bound(timeout_s)
        self._scope.completions.check()
        try:
            over = wait(limit_s)
        except NativeError as error:
            raise translate(error, peer=self._scope.peer_name) from None
        # Events about peers and regions may be in the ring, and no other reader may be taking them out.
        self._scope.completions.drain()
        return over

    def _raise_unless_arrived(self, index: int) -> None:
        if not self._handle.layer_arrived(index):
            self._raise_if_failed()


class Transfer(Work):
    """One posted copy, at the end that posted it. Made by ``agent.write`` and ``agent.read``."""

    __slots__ = ()

    def mark_ready(self, num_layers: int) -> None:
        """Lets the first `num_layers` of `layers` of a transfer move that was posted with ``hold``.

        The bytes of these layers must be final; those of a read may land from now on. Layers stay ready. The
        call is ignored if an earlier call marked as many, if the transfer is not held, or if it has ended.

        Parameters
        ----------
        num_layers
            The total count, from the first of `layers`; not the number of additional layers.
            ``len(transfer.layers)`` starts all of the transfer.

        Raises
        ------
        UsageError
            ``out-of-range`` for more layers than it has; ``invalid-argument`` if it is not a whole number.
        """
        num_layers = count(num_layers, "num_layers", 0, _MOST)
        if num_layers > len(self.layers):
            raise UsageError(
                f"mark_ready() was called for {num_layers} layers, but the transfer has {len(self.layers)}",
                code="out-of-range",
            )
        self._scope.completions.check()
        try:
            self._handle.layers_ready(num_layers)
        except NativeError as error:
            raise translate(error, peer=self._scope.peer_name) from None

    def _follow(self, after: Any) -> None:
        """Starts the transfer when the future `after` is done, or cancels it if the future failed."""
        if self._scope.completions.lost:
            return
        if after.cancelled() or after.exception() is not None:
            self._handle.cancel()
        else:
            self._handle.layers_ready(len(self.layers))


class Incoming(Work):
    """A receiver's handle on blocks that peers write. Made by ``agent.expect``.

    Done when every layer of every block has arrived, from one transfer or several. Awaiting it raises the
    errors that awaiting a `Transfer` raises (docs/errors.md). The cause is its own end or the failure of a
    writer. If `expect` was given no context, the error has the `context` of that writer.
    """

    __slots__ = ("_tag",)

    def __init__(self, handle: NativeHandle, scope: Scope, tag: bytes) -> None:
        super().__init__(handle, scope)
        self._tag = tag

    @property
    def tag(self) -> bytes:
        """The tag, as `expect` was given it."""
        return self._tag

    def _tag_words(self) -> str:
        return f" tag={self._tag[:64]!r}"
