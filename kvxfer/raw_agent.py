"""The raw agent: an agent for callers that name memory by addresses, without layouts or leases.

Bindings to interfaces of that kind use it (`kvxfer.connectors.nixl`). For your own programs use
`kvxfer.Agent`. native/raw_agent/agent.h explains how it works.

Descriptors are rows of address, length in bytes and device: an array of shape [N, 3] and dtype uint64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvxfer._native import NativeError, descriptor_rows
from kvxfer._native import RawAgent as NativeRawAgent
from kvxfer.address import published
from kvxfer.errors import translate
from kvxfer.log import logger
from kvxfer.naming import check_name
from kvxfer.options import AgentOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvxfer._native import PreparedList, RawRequest

    Rows = NDArray[np.uint64]

__all__ = ["RawAgent", "Request", "rows_of"]


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
        An item is not a tuple of `width` fields, or one of its fields is not an integer.
    OverflowError
        A field is below 0, or beyond 64 bits.
    """
    return descriptor_rows(tuples, width)


class Request:
    """A transfer of some descriptors.

    It may be posted again once it has ended. It is released when the object is dropped.
    """

    def __init__(self, native: RawRequest, remote: str) -> None:
        self._native = native
        self._remote = remote

    def post(self, notify: bytes) -> bool:
        """Starts the transfer, and returns whether it is done already.

        The remote agent gets `notify` once every byte is in place; if it is empty, there is no notification.

        Raises
        ------
        TransferError
            ``refused``: it is under way already.
        KvxferError
            The error that ended it, or that prevented its start.
        """
        with _translated(self._remote):
            return self._native.post(notify) == 0

    def is_done(self) -> bool:
        """Returns whether it is done, after one round of progress on this thread.

        Raises
        ------
        UsageError
            The transfer was not posted.
        KvxferError
            The error that ended it.
        """
        with _translated(self._remote):
            return self._native.check() == 0

    def release(self) -> None:
        """Ends the transfer. After this returns no byte of it can land, at either end.

        A write ends when the remote agent has said that it has stopped. If the session is lost first, this
        returns, and the remote agent stops when it notices the loss.

        Raises
        ------
        TransferError
            ``deadline``: that took longer than a transfer may. The transfer is not released; call again.
        """
        with _translated(self._remote):
            self._native.release()

    @property
    def nbytes(self) -> int:
        """Bytes of all descriptors."""
        return self._native.nbytes

    @property
    def num_descriptors(self) -> int:
        """Pairs of descriptors in the request."""
        return self._native.num_descriptors

    @property
    def num_transfers(self) -> int:
        """Transfers that the pairs were merged into."""
        return self._native.num_transfers

    @property
    def times_ns(self) -> tuple[int, int, int]:
        """Times of posting, of the return of `post`, and of the end, by CLOCK_MONOTONIC; 0: not yet."""
        return self._native.posted_ns, self._native.begun_ns, self._native.ended_ns


class RawAgent:
    """An agent for lists of addresses. Every method may be called from any thread.

    Parameters
    ----------
    name
        The agent's name among its peers; distinct among agents that know each other.
    options
        As for a `kvxfer.Agent`. Peers authenticate with its secret or certificates; the metadata contain
        `advertise`.
    timeout_s
        Deadline of a transfer, counted from its post.
    exchanges
        Whether agents that prove the secret may ask this one for its metadata, which open all memory that is
        registered, and send it theirs (`tell`, `ask`, `withdraw`).

    Raises
    ------
    KvxferError
        The same errors as `kvxfer.Agent`.
    """

    def __init__(
        self, name: str, options: AgentOptions, timeout_s: float, *, exchanges: bool = False
    ) -> None:
        check_name(name, "name")
        native = options.to_native()
        if options.gpu_in_use is not None:
            from kvxfer.gpu import part

            native["gpus"] = [part.of_agent(options, options.gpu_in_use)]
        with _translated():
            self._native = NativeRawAgent(name, native, "", timeout_s, exchanges)
        address, note = published(self._native.address, options.advertise)
        if note:
            logger().warning("kvxfer: %s: %s", name, note)
        self._native.advertise(address)

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._native.address.rpartition(":")[2])

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends everything; after this returns no byte can land."""
        self._native.close(timeout_s)

    def register(self, rows: Rows, *, is_gpu: bool = False) -> None:
        """Registers memory. Keep it in place until it is deregistered, or the raw agent is closed.

        Raises
        ------
        UsageError
            A row has no bytes, or GPU rows lie on several GPUs.
        """
        with _translated():
            self._native.register(rows, is_gpu)

    def deregister(self, rows: Rows, *, is_gpu: bool = False) -> None:
        """Takes memory from peers; after this returns no byte of theirs can land there.

        Raises
        ------
        UsageError
            ``unknown-region``: a row was not registered in this form.
        """
        with _translated():
            self._native.deregister(rows, is_gpu)

    def metadata(self) -> bytes:
        """Returns metadata by which another agent finds this one and uses all memory registered now."""
        return self._native.metadata()

    def metadata_of(self, rows: Rows, *, is_gpu: bool = False, with_address: bool) -> bytes:
        """Returns metadata of the memory that holds these rows.

        Set `with_address` for agents that do not know this one.

        Raises
        ------
        UsageError
            ``unknown-region``: a row was not registered in this form.
        """
        with _translated():
            return self._native.metadata_of(rows, is_gpu, with_address)

    def invalidate(self) -> None:
        """Ends every right that metadata gave until now; after this returns no byte can land under one."""
        self._native.invalidate()

    def add_remote(self, metadata: bytes) -> str:
        """Accepts another agent's metadata, begins to connect to it, and returns its name.

        Raises
        ------
        PeerError
            ``protocol``: the bytes are not metadata.
        UsageError
            The metadata are this agent's own, or have only memory of an unknown agent.
        """
        with _translated():
            return self._native.add_remote(metadata)

    def remove_remote(self, name: str) -> None:
        """Forgets an agent, and ends its session with all its transfers.

        Raises
        ------
        UsageError
            ``unknown-region``: no metadata of it were added.
        """
        with _translated(name):
            self._native.remove_remote(name)

    def tell(self, address: str, metadata: bytes) -> None:
        """Sends this agent's metadata to the agent at an address, which adds them if it `exchanges` metadata.

        Returns before that.

        Raises
        ------
        KvxferError
            The address is not valid, or calls are not possible.
        """
        with _translated():
            self._native.tell(address, metadata)

    def ask(self, address: str, name: str) -> None:
        """Asks the agent at an address for its metadata, and adds them if they are `name`'s; see `tell`."""
        with _translated():
            self._native.ask(address, name)

    def withdraw(self, address: str) -> None:
        """Asks the agent at an address to forget this agent; see `tell`."""
        with _translated():
            self._native.withdraw(address)

    def connect(self, name: str) -> None:
        """Waits until a remote agent's session is open and the agent has granted what its metadata name.

        Raises
        ------
        PeerError
            There is no session; the message says why.
        """
        with _translated(name):
            self._native.connect(name)

    def has_remote(self, name: str, rows: Rows, *, is_gpu: bool = False) -> bool:
        """Returns whether a remote agent's metadata were added and name memory that holds the rows."""
        return self._native.has_remote(name, rows, is_gpu)

    def is_connected(self, name: str) -> bool:
        """Returns whether a session with a remote agent is open."""
        return self._native.is_connected(name)

    def prepare(self, of: str, rows: Rows, *, is_gpu: bool = False) -> PreparedList:
        """Prepares descriptors of local memory (``of=""``), or of a remote agent's, for transfers.

        Rows of five numbers end with a stride and a count, and stand for `count` blocks, `stride` bytes
        apart. They take memory only as far as they lie in registered memory.

        Raises
        ------
        UsageError
            ``unknown-region``: the message names the first row that is in no registered memory.
        """
        with _translated(of):
            return self._native.prepare(of, rows, is_gpu)

    def make(
        self,
        local: PreparedList,
        remote: PreparedList,
        *,
        is_write: bool,
        remote_agent: str = "",
        local_entries: NDArray[np.uint32] | None = None,
        remote_entries: NDArray[np.uint32] | None = None,
    ) -> Request:
        """Makes a request from entries of two lists, pair by pair; None: all entries of a list.

        Raises
        ------
        UsageError
            ``length-mismatch``, ``out-of-range``: the message names the pair.
        """
        with _translated(remote_agent):
            made = self._native.make(is_write, local, local_entries, remote, remote_entries)
        return Request(made, remote_agent)

    def notify(self, remote: str, payload: bytes) -> None:
        """Sends a notification of up to 65,535 bytes; waits for the session first if it is not open yet.

        Raises
        ------
        UsageError
            ``unknown-region``: no metadata of that agent were added.
        PeerError
            There is no session.
        """
        with _translated(remote):
            self._native.notify(remote, payload)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Returns the notifications since the last call: the remote agent, and the payload."""
        return self._native.take_notifications()
