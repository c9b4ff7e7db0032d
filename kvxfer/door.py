"""The native door: an agent for callers that name memory by addresses, and neither layouts nor leases.

What binds kvxfer to interfaces of that kind stands on it (`kvxfer.connectors.nixl`); who writes a program of
their own takes `kvxfer.Agent`. native/door/agent.h says how it works.

Descriptors are rows of address, length in bytes and device: an array of shape [N, 3] and dtype uint64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvxfer._native import Door as NativeDoor
from kvxfer._native import NativeError, descriptor_rows
from kvxfer.address import published
from kvxfer.errors import translate
from kvxfer.log import logger
from kvxfer.options import AgentOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvxfer._native import DoorList, DoorRequest

    Rows = NDArray[np.uint64]

__all__ = ["Door", "Request", "rows_of"]


@contextmanager
def _translated(peer: str = "") -> Iterator[None]:
    try:
        yield
    except NativeError as error:
        raise translate(error, peer=peer) from None


def rows_of(tuples: list[tuple[object, ...]], width: int) -> Rows:
    """Returns the first three fields of tuples of `width` fields as rows.

    Raises
    ------
    TypeError
        One is no tuple of so many, or a field of it no integer.
    OverflowError
        A field is below 0, or beyond 64 bits.
    """
    return descriptor_rows(tuples, width)


class Request:
    """A transfer of some descriptors, which may be posted again once it has ended. Released when it goes."""

    def __init__(self, native: DoorRequest, remote: str) -> None:
        self._native = native
        self._remote = remote

    def post(self, notify: bytes) -> bool:
        """Begins it, and returns whether it is done already.

        `notify` is told to the remote agent once every byte is where it goes; empty: nothing is.

        Raises
        ------
        TransferError
            ``refused``: it is under way.
        KvxferError
            Whatever ended it, or had it not begin.
        """
        with _translated(self._remote):
            return self._native.post(notify) == 0

    def is_done(self) -> bool:
        """Returns whether it is done, after one round of progress on this thread.

        Raises
        ------
        UsageError
            It was not posted.
        KvxferError
            What ended it.
        """
        with _translated(self._remote):
            return self._native.check() == 0

    def release(self) -> None:
        """Ends it. When this returns nothing of it can land any more."""
        self._native.release()

    @property
    def nbytes(self) -> int:
        """Of all descriptors."""
        return self._native.nbytes

    @property
    def num_descriptors(self) -> int:
        """Pairs that were named."""
        return self._native.num_descriptors

    @property
    def num_transfers(self) -> int:
        """What they became."""
        return self._native.num_transfers

    @property
    def times_ns(self) -> tuple[int, int, int]:
        """When it was posted, when `post` had returned, when it ended; 0: not yet. CLOCK_MONOTONIC."""
        return self._native.posted_ns, self._native.begun_ns, self._native.ended_ns


class Door:
    """An agent of lists of addresses. Every method may be called from any thread.

    Parameters
    ----------
    name
        What others call it; distinct among those that know each other.
    options
        As a `kvxfer.Agent`'s. Its secret and certificates are what peers prove; `advertise` is what metadata
        name.
    timeout_s
        Of a transfer, from its post on.

    Raises
    ------
    KvxferError
        As `kvxfer.Agent` does.
    """

    def __init__(self, name: str, options: AgentOptions, timeout_s: float) -> None:
        native = options.to_native()
        if options.device is not None:
            from kvxfer.gpu import part

            native["gpus"] = [part.of_agent(options, options.device)]
        with _translated():
            self._native = NativeDoor(name, native, "", timeout_s)
        address, note = published(self._native.address, options.advertise)
        if note:
            logger().warning("kvxfer: %s: %s", name, note)
        self._native.advertise(address)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._native.address.rpartition(":")[2])

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends everything; nothing of it can land when this returns."""
        self._native.close(timeout_s)

    def register(self, rows: Rows, *, is_gpu: bool = False) -> None:
        """Registers memory. It stays where it is until it is deregistered, or the door is closed.

        Raises
        ------
        UsageError
            A row has no bytes, or rows of a GPU are of several.
        """
        with _translated():
            self._native.register(rows, is_gpu)

    def deregister(self, rows: Rows, *, is_gpu: bool = False) -> None:
        """Takes memory from peers; when this returns no byte of theirs can land there.

        Raises
        ------
        UsageError
            ``unknown-region``: a row was not registered as it is.
        """
        with _translated():
            self._native.deregister(rows, is_gpu)

    def metadata(self) -> bytes:
        """Returns what lets another agent find this one and use all memory that is registered now."""
        return self._native.metadata()

    def metadata_of(self, rows: Rows, *, is_gpu: bool = False, with_address: bool) -> bytes:
        """Returns the same of what holds these rows; `with_address`: for agents that do not know this one.

        Raises
        ------
        UsageError
            ``unknown-region``: a row was not registered as it is.
        """
        with _translated():
            return self._native.metadata_of(rows, is_gpu, with_address)

    def invalidate(self) -> None:
        """Ends every right that metadata gave until now; when this returns nothing under one can land."""
        self._native.invalidate()

    def add_remote(self, metadata: bytes) -> str:
        """Takes in what another agent tells of itself, begins to connect to it, and returns its name.

        Raises
        ------
        PeerError
            ``protocol``: these are no metadata.
        UsageError
            They are this agent's own, or such of memory alone of an agent that is not known.
        """
        with _translated():
            return self._native.add_remote(metadata)

    def remove_remote(self, name: str) -> None:
        """Forgets an agent, and ends its session and what is under way in it.

        Raises
        ------
        UsageError
            ``unknown-region``: no metadata of it were taken in.
        """
        with _translated(name):
            self._native.remove_remote(name)

    def tell(self, address: str, metadata: bytes) -> None:
        """Sends metadata of this agent to who listens at an address, who takes them in; returns before that.

        Raises
        ------
        KvxferError
            The address is none, or nobody can be called.
        """
        with _translated():
            self._native.tell(address, metadata)

    def ask(self, address: str, name: str) -> None:
        """Asks who listens at an address for its metadata, to be taken in if they are `name`'s; as `tell`."""
        with _translated():
            self._native.ask(address, name)

    def withdraw(self, address: str) -> None:
        """Has who listens at an address forget this agent; as `tell`."""
        with _translated():
            self._native.withdraw(address)

    def connect(self, name: str) -> None:
        """Waits until the session with a remote agent is open and it has granted what its metadata name.

        Raises
        ------
        PeerError
            There is no session, and why.
        """
        with _translated(name):
            self._native.connect(name)

    def has_remote(self, name: str, rows: Rows, *, is_gpu: bool = False) -> bool:
        """Returns whether a remote agent's metadata are here, and name memory that holds the rows."""
        return self._native.has_remote(name, rows, is_gpu)

    def is_connected(self, name: str) -> bool:
        """Returns whether a session with a remote agent is open."""
        return self._native.is_connected(name)

    def prepare(self, of: str, rows: Rows, *, is_gpu: bool = False) -> DoorList:
        """Prepares descriptors of memory here (``of=""``), or of a remote agent's, for any transfers.

        Raises
        ------
        UsageError
            ``unknown-region``: the message names the first row that nothing holds.
        """
        with _translated(of):
            return self._native.prepare(of, rows, is_gpu)

    def make(
        self,
        local: DoorList,
        remote: DoorList,
        *,
        is_write: bool,
        remote_agent: str = "",
        local_entries: NDArray[np.uint32] | None = None,
        remote_entries: NDArray[np.uint32] | None = None,
    ) -> Request:
        """Joins entries of two lists, pair by pair; None: all of a list.

        Raises
        ------
        UsageError
            ``length-mismatch``, ``out-of-range``: the message names the pair.
        """
        with _translated(remote_agent):
            made = self._native.make(is_write, local, local_entries, remote, remote_entries)
        return Request(made, remote_agent)

    def notify(self, remote: str, payload: bytes) -> None:
        """Sends a notification of up to 64 KiB, after waiting for the session where it is not open yet.

        Raises
        ------
        UsageError
            ``unknown-region``: no metadata of that agent were taken in.
        PeerError
            There is no session.
        """
        with _translated(remote):
            self._native.notify(remote, payload)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Returns what came since the last call: the remote agent, and what it told."""
        return self._native.take_notifications()
