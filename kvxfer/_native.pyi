"""Reference of the compiled module: the native half of an agent.

This layer only converts; the Python package gives its numbers their meaning. No call holds the GIL while it
waits or while bytes move. Times are seconds as float, timestamps are nanoseconds of CLOCK_MONOTONIC, sizes
are bytes. A failing call raises ``NativeError(code, message)``, with ``code`` one of
native/include/kvxfer/status.h; ``kvxfer.errors.translate`` turns it into the public exception.
"""

from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvxfer.session.requests import Expected, Grant, Program, Terms
from kvxfer.session.stats import CoreStats

__version__: str
#: code name -> number, e.g. ``CODES["lease-ended"] == 31``.
CODES: Final[dict[str, int]]
#: The compiler, its version and its flags, for the record of measurements.
BUILD: Final[str]
#: "avx512-nt", "avx2-nt" or "memcpy": the copy executor's choice on this machine.
COPY_KERNEL: Final[str]
#: sizeof(CopyLoop), for the check of plan.program.LOOP_DTYPE.
COPY_LOOP_NBYTES: Final[int]
MIN_STAGING_NBYTES: Final[int]
CONVERSION_NBYTES: Final[int]
#: "avx512", "avx2" or "scalar": the converter of dtypes on this machine.
CONVERT_KERNEL: Final[str]

class NativeError(Exception):
    """``args == (code, message)``."""

class PoolMemory:
    """Shareable memory of this process: a sealed memfd, mapped with guard pages around it.

    The mapping lives as long as this object or any array made from it.
    """

    def __init__(self, nbytes: int, name: str, huge_pages: bool = True, numa_node: int = -1) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def page_kind(self) -> Literal["hugetlb", "transparent-huge", "base"]:
        """The kind of pages that the kernel gave."""
    @property
    def seals(self) -> tuple[str, ...]:
        """Seals in force, e.g. ``("grow", "shrink", "future-write", "seal")``."""
    def array(self) -> NDArray[np.uint8]:
        """All bytes, writable, no copy; keeps this object alive."""

PAGE_FILE_BLOCK_NBYTES: int

#: What a call of `PageFiles` answers.
PageAnswer = Literal["begun", "there", "missing", "no-room", "busy", "out", "too-slow"]
#: How what it began has ended.
PageEnd = Literal["done", "gone", "damaged", "failed", "out"]

class PageFiles:
    """Pages in the files of a directory, which outlive the process: a tier of the daemon's page store.

    Its threads do the I/O; no call waits for the disk except making it and `close`. A call that answers
    ``"begun"`` has its ticket in `take_ended` later; until then its memory must stay.

    Raises
    ------
    NativeError
        ``refused``: another process has the directory, or it is of another format or user. ``system``: a
        system call failed.
    """

    def __init__(
        self,
        directory: str,
        nbytes: int,
        tenant_of_salt: list[int],
        num_threads: int = 16,
        stalled_s: float = 10.0,
        retry_s: float = 5.0,
    ) -> None: ...
    @property
    def event_fd(self) -> int:
        """Readable when `take_ended` has something."""
    @property
    def is_direct(self) -> bool: ...
    @property
    def why_not_direct(self) -> str: ...
    def write(
        self, digest: bytes, salt: int, key: str, address: int, nbytes: int, durable: bool, ticket: int
    ) -> PageAnswer: ...
    def read(
        self, digest: bytes, address: int, nbytes: int, worth_s: float, ticket: int
    ) -> PageAnswer: ...
    def drop(self, digest: bytes, ticket: int) -> PageAnswer: ...
    def sync(self, digest: bytes, ticket: int) -> PageAnswer: ...
    def look_up(self, digests: bytes, counts: bool) -> bytes:
        """One byte for each digest of 16 bytes: whether its page is there."""
    def pages(
        self, segment: int, slot: int, tenant: int | None, most: int
    ) -> list[tuple[int, int, int, str, bool, int]]:
        """(segment, slot, salt, key, whether the key is cut, bytes) of pages; may wait for the disk."""
    def take_ended(self) -> tuple[list[tuple[int, PageEnd, int]], list[tuple[bytes, int]]]:
        """(ticket, how, errno) of what has ended, and (digest, salt) of evicted pages."""
    def set_tenant(self, salt: int, tenant: int) -> None: ...
    def set_bound(self, tenant: int, most_nbytes: int) -> None: ...
    def tenant_nbytes(self, tenant: int) -> int: ...
    def read_s(self, nbytes: int) -> float:
        """How long reading one more page would take, by what is known of the disk."""
    def figures(self) -> dict[str, Any]: ...
    def close(self, within_s: float) -> bool:
        """Whether no read or write is left inside the disk; else the memory of all of them must stay."""

class Handle:
    """One end of a transfer, or an expectation (the receiver's handle for blocks that peers write)."""

    @property
    def id(self) -> int: ...
    @property
    def state(self) -> Literal["pending", "done", "failed", "cancelled"]:
        """The last three are final."""
    @property
    def code(self) -> int:
        """The code with which it ended; 0 while pending and when done."""
    @property
    def message(self) -> str: ...
    @property
    def context(self) -> str:
        """This end's context, or else the last one from the other end; "" for none."""
    @property
    def failed_blocks(self) -> NDArray[np.uint32]:
        """This end's block ids whose bytes cannot be relied on. Empty unless failed or cancelled."""
    @property
    def rails(self) -> tuple[str, ...]:
        """Transports that moved its bytes, as seen at this end: a source does not see what the peer fetches
        (loopback, shm). "eager" for bytes that went with its OFFER."""
    @property
    def posted_ns(self) -> int: ...
    @property
    def first_piece_ns(self) -> int:
        """First piece in place (destination end; 0 before, and at a source)."""
    @property
    def ended_ns(self) -> int: ...
    def wait(self, timeout_s: float) -> bool:
        """Drives progress until the state is final or the time is over; True when final.
        ``timeout_s < 0`` waits without bound. Raises NativeError(kClosed) when the agent closes
        first. Python signal handlers run at least every 100 ms."""
    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        """The same for the arrival of ``layer`` (destination ends); True also when final."""
    def layer_arrived(self, layer: int) -> bool: ...
    def watch_layer(self, layer: int) -> bool:
        """Requests one LAYER event for ``layer``; True if the layer is in already (then there is no
        event)."""
    def layers_ready(self, layers: int) -> None:
        """For the source of a write: marks the first ``layers`` layers as final, so that they may be
        fetched."""
    def cancel(self) -> None:
        """Requests its end; the state is final later, when the last byte can no longer move."""
    @property
    def gpu(self) -> int:
        """The index of the agent's GPU; -1 without one."""
    def wait_in(self, stream: int, layer: int | None) -> StreamWait:
        """Makes a CUstream wait for the end, or for ``layer``. The stream always goes on in the end."""

class StreamWait:
    """A stream's wait; dropping this object does not affect the stream."""

    @property
    def outcome(self) -> int:
        """0 pending, 1 done, 2 failed, 3 cancelled."""
    @property
    def address(self) -> int:
        """Address of the outcome: 4 bytes that a GPU reads, valid while this object exists."""

class Event:
    """One entry of the completion ring."""

    @property
    def kind(self) -> str:
        """``"ended"`` (handle), ``"layer"`` (handle, layer), ``"notification"`` and ``"message"`` (one or more
        came), ``"room"`` (peer: for messages), ``"peer-up"``, ``"peer-lost"`` (peer, code, message),
        ``"region"``, ``"region-gone"`` (peer, region), ``"lease-ended"`` (peer, lease, code: one that this
        agent granted), ``"lease-acknowledged"`` (lease: see `AgentCore.await_acknowledged`), ``"commands"`` (handle: the
        ring's), ``"log"`` (message: one line for the log)."""
    @property
    def handle(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def region(self) -> int: ...
    @property
    def lease(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def code(self) -> int: ...
    @property
    def message(self) -> str: ...

class Trigger:
    """A 4-byte word that counts progress; `AgentCore.trigger` and `trigger_over` make one."""

    @property
    def value(self) -> int: ...
    def fire(self, value: int) -> None:
        """Stores a value if it is greater than the present one, and wakes every agent that waits for it."""
    def reset(self) -> None: ...
    def share(self) -> int:
        """Its address, for stores by others: waiting agents poll it from now on."""

class After:
    """Releases layer k of a transfer once ``trigger.value >= first + k * step``; a step of 0 releases all at
    once."""

    def __init__(self, trigger: Trigger, first: int, step: int) -> None: ...

def trigger_over(memory: Any) -> Trigger:
    """Makes a trigger over a writable buffer of 4 bytes, which stays exported while a transfer waits for
    it."""

class Sender:
    """Who sent a notification or a message."""

    def info(self) -> dict[str, Any]:
        """``name``, ``incarnation``, ``identity`` and ``is_ours``, as `AgentCore.peer` has them."""

class Installed:
    """A copy program, for as long as this or a `Route` has it."""

class Route:
    """A peer's program and some of its layers, ready for posting."""

    def post(
        self,
        src_blocks: Any,
        dst_blocks: Any,
        num_fine: int,
        notify: bytes,
        timeout_s: float | None,
        context: str | bytes,
        terms: Terms,
    ) -> Handle:
        """Posts a write or a read, depending on the program. The blocks are ids of units
        (kvxfer/plan/units.py); the last ``num_fine`` are ids of tokens. If it raises, nothing was posted:
        NativeError, an error of ``as_ids``, or TypeError for a wrong kind."""

class CommandRing:
    """The host's side of a command ring; `AgentCore.command_ring` makes one."""

    @property
    def id(self) -> int:
        """The ``handle`` of "commands" events, which report that one of its commands has ended."""
    @property
    def address(self) -> int:
        """Address of the CommandRing (native/include/kvxfer/command.h) for kernels."""
    @property
    def num_commands(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of commands that were taken, have ended, and have failed; each includes the next."""
    def prepare(
        self,
        route: Route,
        first_layer: int,
        src_blocks: Any,
        dst_blocks: Any,
        notify: bytes,
        timeout_s: float | None,
        context: str | bytes,
        terms: Terms,
    ) -> int:
        """Returns the number by which commands name pairs of these tables. ``first_layer`` is the commands'
        number for the route's first layer. ``terms`` apply to each write; their ``hold`` is ignored."""
    def forget(self, prepared: int) -> None: ...
    def start(self, prepared: int, pair: int, layer: int, num_pairs: int) -> bool:
        """Like ``start`` in kvxfer/device.cuh, with one attempt, for a ring in the process's own memory."""
    def take_failures(self) -> list[tuple[int, int, int, int, int, int, str]]:
        """Index of the command, number of the prepared write, pair, number of pairs, layer, code, message;
        the newest 1024 untaken failures."""
    def wait(self, num_ended: int, timeout_s: float) -> bool:
        """Like ``Handle.wait``, until that many commands have ended."""
    def close(self) -> None:
        """After it returns no more commands are taken out of the ring."""

class AgentCore:
    """An agent: its sockets, its progress thread, its tables.

    ``options`` is a dict with exactly these keys (kvxfer/options.py: AgentOptions gives defaults): ``listen``
    ("tcp://127.0.0.1:0", or "" to accept no peers), ``secret`` (bytes, b"" for none), ``second_secret``
    (bytes: also accepted, b"" for none), ``user_secret`` (bytes, b"" if there is another secret),
    ``secret_file`` (absolute path of the file of both, which is read again when it changes; "" for none),
    ``transports`` (list of names from `transports`), ``require`` (list of those that every session must
    have), ``transport_options`` (dict: bool, int or str by option names from `transports`, e.g. "tcp.rails"),
    ``gpus`` (list of a dict for each GPU of the agent, one at most: ``device``, its index; ``kernels``, a
    CUfunction or 0 for each of copy_vectors, copy_bulk and convert; ``owner``, the kernels' owner, which is
    kept alive as long as they may be launched; ``ipc_ctas`` and ``staging_ctas``, most CTAs of a copying
    kernel, between GPUs and for staging; ``staging_nbytes``, pinned memory for that GPU's pages over streams,
    0 for none; ``way_samples``, a list of `GpuSample` that decides when staging uses copy engines),
    ``silent_timeout_s``, ``heartbeat_interval_s``, ``handshake_timeout_s``, ``lease_margin_s``, ``spin_us``
    (int), ``integrity`` (bool), ``max_transfers_per_peer``, ``eager_nbytes`` and ``copy_threads`` (int),
    ``faults`` (str, "" or the seed and rates of kvxfer.testing).
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None: ...
    @property
    def address(self) -> str:
        """The address on which it listens, with the port; "" if it accepts no peers."""
    @property
    def incarnation(self) -> bytes: ...
    @property
    def event_fd(self) -> int:
        """Readable while there are events, once a ``drain(arm=True)`` that returned an empty list has armed
        it."""
    def drain(self, max_events: int = 256, arm: bool = True) -> list[Event]:
        """Takes events. Raises NativeError if there are none and the agent has ended by itself."""
    def add_waiters(self, change: int) -> None:
        """Adds ``change`` to the number of waiters for "ended", "layer", "commands", "notification",
        "message", "room" or "lease-acknowledged" events; without waiters such events are not made. A waiter first
        calls this, and then checks its condition once more."""
    def take_notification(self) -> tuple[int, bytes, str, Sender] | None:
        """Takes the oldest unread notification (peer, payload, context, sender). Of lost peers the newest 16384 are
        kept; a "log" event reports the first dropped one."""
    def take_message(self) -> tuple[int, bytes, Sender] | None:
        """Takes the oldest unread message (peer, payload, sender), with the same limits. The sender is notified after
        each quarter of the limit."""
    def send(self, peer: int, payload: bytes) -> None:
        """Sends a message. Raises NativeError(kExhausted) if there is no room; a "room" event follows when
        there is."""
    def has_room(self, peer: int, nbytes: int) -> bool:
        """Whether there is room for a message of this size; if not, a "room" event follows."""
    @property
    def sockets_fd(self) -> int:
        """Readable while sockets have work for ``serve``."""
    @property
    def serves(self) -> bool:
        """Whether an event loop gains by ``serve``: all sessions are on this host, with frames in shared
        memory."""
    def serve(self) -> bool:
        """Does the short part of the work that made ``sockets_fd`` readable. False: another driver or the
        agent's thread has the sockets (or the agent is closed); stop watching them until the ring has an
        event."""
    def leave(self) -> None:
        """The loop stops serving; the agent's thread has the sockets again at once."""
    def poll(self) -> int:
        """Drives progress once without blocking. 0: nothing moved; 1: something moved or arrived; 2: also,
        there are events to drain."""
    def close(self, timeout_s: float) -> None:
        """Fences and ends everything, says goodbye to peers, joins the thread. Idempotent; a second thread's
        call returns when the first call has ended."""
    @property
    def ended(self) -> bool:
        """Whether ``close`` has ended: no memory is served any more."""
    def stats(self) -> CoreStats: ...

    # Records of transfers (kvxfer/session/records.py decodes them). native/DESIGN.md explains their costs,
    # and which threads may call.
    def watch_records(self, capacity: int) -> int:
        """From now on each ended end of a transfer and each ended expectation leaves a record. The newest
        ``capacity`` records (65,536 at most) are kept. 0 switches records off.

        Returns a descriptor that the agent owns, always the same one. It is readable while there are records,
        or if something else has changed since they were taken. It is written once for the first record, not
        for each."""
    def take_records(self, max_records: int = 256) -> bytes:
        """Takes the oldest records. From any thread, and after ``close``, without the gate."""
    def note_change(self) -> None:
        """Counts a change that native code does not see, e.g. of the names of regions."""
    @property
    def num_changes(self) -> int:
        """Number of changes: peers that came or went, regions that were registered or lost at either end,
        leases that were granted or ended."""
    def open_transfers(self, most: int) -> bytes:
        """Records of open and draining work: sources, destinations, then expectations. Work that begins or
        ends meanwhile may be missing."""
    def cancel_transfer(self, peer: int, transfer: int, is_source: bool) -> bool:
        """Cancels this end of a transfer; either end may have posted it. The other end fails with code
        "cancelled", or with "lease-ended" if it first finds that the source has its pages back. False: the
        transfer is not open. It ends, and leaves its record, when its copies have ended."""
    def leases(self, most: int) -> list[dict[str, Any]]:
        """Leases that this agent granted and that have not ended, in the order of their numbers: ``lease``,
        ``holder`` (name; for a bearer's lease the permitted names, "" for any), ``peer`` (None for a bearer's
        lease), ``region``, ``mode`` ("read" or "write"), ``num_blocks`` (None: the whole region), ``state``
        ("active", or "ending" while copies under it go on), ``seconds_left``."""

    # Regions. `spans`: int64 [n, 2] of address and nbytes, ascending. `footprint`: the loops
    # (plan.program.LOOP_DTYPE; the dst half is used) over the bytes that block 0 of each layer owns.
    def register(
        self, name: str, spans: NDArray[np.int64], num_blocks: int, footprint: NDArray[np.void], layout: bytes,
        device: int, owner: object,
    ) -> int:
        """``device``: index of the GPU that holds it, -1 for host memory.

        ``owner`` keeps the memory alive; only ``deregister`` or ``close`` releases it."""
    def region_kind(self, region: int) -> Literal["pool", "foreign", "gpu"]: ...
    def region_notes(self, region: int) -> list[str]:
        """Sentences about the rails that cannot reach it, with the reason."""
    def region_node(self, region: int) -> int:
        """The NUMA node of its host memory; -1: several, unknown, or without effect."""
    def deregister(self, region: int, timeout_s: float) -> bool:
        """Fences: after it returns True no byte of the region is touched. Its transfers fail.

        False: a device still copies there after that time (below 0: no limit); call it again to wait on."""

    # Peers: a peer is one session.
    def begin_connect(self, address: str, timeout_s: float) -> int:
        """Begins a session. A "peer-up" event follows when it is open, its rails are up and its regions are
        known; otherwise "peer-lost" follows. A host's name is looked up before the call returns."""
    def disconnect(self, peer: int, code: int = ..., text: str = ...) -> None: ...
    def peer(self, peer: int) -> dict[str, Any]:
        """``name``, ``incarnation`` (bytes), ``state`` ("connecting", "open", "lost"), ``is_ours`` (this
        agent called), ``rails`` (list of "shm", "tcp", ..., alive), ``paths`` (list of sentences: devices and
        addresses of rails that have their own), ``notes`` (list of sentences: transports that were tried and
        are not used, with the reason), ``code``, ``message``; until it is lost ``budget``: by resource
        ("bytes", "mapped bytes", "descriptors", "fence slots", "events", "message bytes") the amount held and
        the limit. Raises NativeError(kPeerLost) for a lost peer once 64 others were lost since."""
    def peers(self) -> list[int]: ...

    # Limits of peers, by name, with or without an open session.
    def renew_certificates(self, files: dict[str, Any]) -> None:
        """Reads the files of ``tls`` again, for connections that begin from now on. May block on the disk."""
    def set_secrets(self, first: bytes, second: bytes) -> None:
        """Replaces both for sessions that begin from now on; ``second`` may be b""."""
    def reload_secrets(self) -> None:
        """The same, from ``secret_file``. May block on the disk."""
    def limit_peer(self, name: str, max_bytes_per_s: int, least_priority: int) -> None:
        """Replaces the limits of a name; 0 and 0 remove them. NativeError(kExhausted): 4096 names have
        limits."""
    def peer_limits(self) -> list[tuple[str, int, int]]:
        """Name, bytes a second (0: any) and least priority number of each limited name, ordered by name."""
    def switch_rails(self, transport: str, on: bool) -> None:
        """Switches the rails of one transport, in all sessions. Off: they go down, and none comes up.
        NativeError(kUnsupported): a session would end; nothing was changed. kInvalidArgument: the agent has
        no such transport."""
    def rails_off(self) -> list[str]: ...
    def peer_regions(self, peer: int) -> list[dict[str, Any]]:
        """``id``, ``name``, ``base``, ``nbytes``, ``num_blocks``, ``layout`` (bytes), ``path`` (the transport
        for transfers with it, "" for none yet), ``notes``."""

    def ways(self, peer: int, region: int, remote: int, converts: bool) -> list[dict[str, Any]]:
        """One row for each rail that is up. First come the rails that can carry pages from a peer's region to
        ours, in the order of choice, then the others: ``transport``, ``path`` (as in ``paths``, without its
        name), ``rank`` (rails of the lowest rank are chosen while one is up), ``is_far`` (from our region's
        memory), ``is_staged`` (through host memory here), ``why_not`` ("" if it can carry pages)."""

    # A program between a local and a remote region; `write`: the source is local.
    def install_program(self, program: Program) -> Installed:
        """Checks a program and sends it to the peer. If the peer has to make room for others, it is sent again
        with the next transfer."""

    def route(
        self,
        peer: int,
        program: Installed,
        first_layer: int,
        num_layers: int,
        timeout_s: float,
        integrity: bool,
        as_ids: Callable[[Any], NDArray[np.uint32]],
    ) -> Route:
        """A route for a program's ``num_layers`` layers from ``first_layer`` on. ``timeout_s`` and
        ``integrity`` are the defaults of its transfers; ``as_ids`` turns other block ids into uint32."""

    # Words that transfers wait for. ``stream`` and ``event`` are driver handles on this agent's GPU.

    def trigger(self) -> Trigger:
        """In pinned memory if the agent has a GPU."""
    def command_ring(self, num_commands: int) -> CommandRing:
        """In pinned memory and on the GPU if the agent has one. ``num_commands`` is a power of two, 2**20 at
        most."""
    def record(self, trigger: Trigger, stream: int, value: int) -> None:
        """Makes a stream store to a trigger from `AgentCore.trigger`, after its earlier work."""
    def after_stream(self, stream: int) -> After: ...
    def after_event(self, event: int) -> After: ...
    def expect(self, expected: Expected) -> Handle:
        """Permits transfers whose ``notify`` equals its tag to write the blocks; done when everything has
        arrived."""

    # Leases that this agent grants.
    def grant(self, grant: Grant) -> int:
        """The lease's number: consecutive, or for a bearer's lease a random number below 2**63."""
    def extend_lease(self, lease: int, ttl_s: float) -> bool:
        """Makes a lease last at least this long from now on; its holder is not notified. False: it has
        ended."""
    def revoke(self, lease: int, timeout_s: float) -> bool:
        """Fences: after it returns True no byte moves under the lease. Idempotent.

        False: a device still copies under it after that time (below 0: no limit)."""
    def await_acknowledged(self, lease: int) -> bool:
        """False: its holder does not know of it yet; a "lease-acknowledged" event follows when the holder does, or
        when the lease ends first. Also True if no peer is notified of it, or if it has ended."""
    def lease_state(self, lease: int) -> str:
        """``"active"``, ``"ending"``, ``"revoked"``, ``"expired"``, ``"peer-lost"``, ``"region-gone"``.
        Raises NativeError(kInvalidArgument) for a lease that ended before 4096 others did."""

def transports() -> list[dict[str, Any]]:
    """The transports of this build, in the order of registration, with the fields of
    native/include/kvxfer/transport_kind.h (kvxfer.session.transport_registry.TransportKind). ``options`` is a
    dict by full names, ``why_off`` is for an agent without a GPU, ``devices`` is a tuple of sentences."""
def check_transports(names: list[str], options: dict[str, Any]) -> None:
    """Raises if an agent could not be made with these ``transports`` and ``transport_options``."""
def close_agents() -> None:
    """Ends all agents of the process; called at the interpreter's exit."""

# Checks of callers' arguments. `name` is the argument's name, for the error.
def to_seconds(value: Any, name: str) -> float:
    """0 to 1e9, from any number that is 0 or more, also numpy's. Raises NativeError(kInvalidArgument)
    otherwise."""
def to_count(value: Any, name: str, low: int, high: int, what: str = "") -> int:
    """A whole number, also numpy's. Raises NativeError(kInvalidArgument) for a bool, for anything but a whole
    number, or if it is not `low` to `high`; `what` describes valid values if the bounds do not suffice."""
def crc32c(data: bytes) -> int: ...
def sha256(data: bytes) -> bytes: ...
def siphash128(key: bytes, data: bytes) -> bytes: ...
def decode_frame(frame: bytes) -> str:
    """For the fuzz test: the message's type name, or raises NativeError(kProtocol)."""
def kernel_tls() -> tuple[Literal["nothing", "one-key", "new-keys"], str]:
    """The kernel's support for encrypting pages over TCP, and why there is none. Tested once, for a second at
    most."""

# Runs one layer of a program without an agent. `units`: (src_units, dst_units, src_tokens, dst_tokens).
Units = tuple[int, int, int, int]

def check_ends(
    program: Program, src: tuple[NDArray[np.void], int, int], dst: tuple[NDArray[np.void], int, int]
) -> None:
    """Raises NativeError where two agents would refuse a program. `src` and `dst` are (footprint, num_blocks,
    nbytes) of the regions, as `AgentCore.register` takes them; the regions' ids are ignored."""
def expand(
    loops: NDArray[np.void], layer: int, src_ids: NDArray[np.uint32], dst_ids: NDArray[np.uint32],
    num_fine: int = 0, units: Units = ...,
) -> NDArray[np.uint64]:
    """Returns the runs [n, 3] (src_offset, dst_offset, nbytes at the source), as every executor sees them."""
def execute(
    loops: NDArray[np.void], conversions: NDArray[np.void], scales: NDArray[np.float32], units: Units,
    layer: int, src_ids: NDArray[np.uint32], dst_ids: NDArray[np.uint32], num_fine: int,
    src: NDArray[np.uint8], dst: NDArray[np.uint8],
) -> None:
    """Copies and converts from one memory to the other, as shm does."""
def pack(
    loops: NDArray[np.void], conversions: NDArray[np.void], scales: NDArray[np.float32], units: Units,
    layer: int, src_ids: NDArray[np.uint32], dst_ids: NDArray[np.uint32], num_fine: int, src: NDArray[np.uint8],
) -> bytes:
    """Returns the bytes that cross a stream: gathered and converted at the source."""
def unpack(
    loops: NDArray[np.void], conversions: NDArray[np.void], scales: NDArray[np.float32], units: Units,
    layer: int, src_ids: NDArray[np.uint32], dst_ids: NDArray[np.uint32], num_fine: int, packed: bytes,
    dst: NDArray[np.uint8],
) -> None:
    """Scatters what `pack` made."""
def convert(
    src_dtype: str, dst_dtype: str, src: NDArray[np.uint8], count: int, src_scale: float | None,
    dst_scale: float | None, saturate: bool, kernel: str = "",
) -> bytes:
    """Converts `count` elements; `kernel`: "scalar", "avx2", "avx512", "" for the best."""

def gpu_driver_missing() -> str | None:
    """Why this process has no CUDA driver; None if it has one."""
def gpu_pool_check(device: int) -> None:
    """Raises if the device cannot make memory that other processes can map."""
def gpu_pool_failure() -> str:
    """Why the last allocation of ``kvxfer_gpu_allocate`` failed; "" for none since the last call."""
def gpu_pool_nbytes(device: int) -> int:
    """Bytes allocated there now, rounded up to the device's granularity."""
def gpu_pool_handles(device: int) -> str:
    """How other processes map it: "fabric" (or by descriptor), "descriptor"; "" before the first
    allocation."""
def gpu_export(address: int) -> tuple[int, int, int, bytes, int]:
    """Exports the allocation that holds a GPU address, for other processes: kind (1 fabric, 2 descriptor, 3
    IPC), its first address, its nbytes, 64 bytes of a handle, a descriptor that is the caller's (-1:
    none)."""

class GpuPeerMapping:
    """Such an allocation of another process, mapped so that kernels of this one may store to it."""

    def __init__(self, device: int, kind: int, nbytes: int, handle: bytes, fd: int) -> None:
        """The caller still owns ``fd``."""
    @property
    def address(self) -> int:
        """Address of the allocation's first byte in this process; 0 once closed."""
    def close(self) -> None:
        """Waits for the device, then unmaps."""

def gpu_atoms(
    num_layers: int, loops: NDArray[np.void], conversions: NDArray[np.void], scales: NDArray[np.float32],
    units: Units, layers: tuple[int, int], src_ids: NDArray[np.uint32], dst_ids: NDArray[np.uint32],
    num_fine: int, src_address: int, dst_address: int, bulk: bool,
) -> NDArray[np.uint64]:
    """The copies of a GPU's lanes, [n, 4]: kernel, src_offset, dst_offset, nbytes at the source.

    Computed on the host by the header that the kernels compile. `layers`: the first, and the number.
    """

# Times of kernels and copy engines for the same bytes: direction (0: to the host, 1: to the device), form (0:
# runs, 1: rows of a 2-D copy), alignment, run_nbytes, kernel_ns, engine_ns.
GpuSample = tuple[int, int, int, int, int, int]

# Time of kernels for some bytes: direction, num_ctas, nbytes, ns.
GpuCtaSample = tuple[int, int, int, int]

def gpu_calibrate(
    device: int, kernels: tuple[int, int, int]
) -> tuple[list[GpuCtaSample], list[GpuSample], str | None]:
    """Measures for a second at most. Returns samples by CTAs, samples by way, and the reason if there are no
    copy engines; a list is [] if the time did not suffice. Raises if there is no memory, or the device
    fails."""
def gpu_staging_ctas(samples: list[GpuCtaSample]) -> int:
    """CTAs for staging that follow from these samples, in any order; 4 without samples. Raises
    "invalid-argument" for impossible samples."""
def gpu_least_runs(samples: list[GpuSample]) -> list[tuple[int, int, int, int | None]]:
    """Direction, form, looseness (0: 16 bytes, 1: 8) and the least bytes of a run for which engines are used.
    Raises "invalid-argument" for impossible samples."""

class GpuProgram:
    """A copy program, parsed once."""

    def __init__(
        self, num_layers: int, loops: NDArray[np.void], conversions: NDArray[np.void],
        scales: NDArray[np.float32], units: Units,
    ) -> None: ...

class GpuCopyStream:
    """A stream of copies between memories that a device reaches; one thread at a time."""

    def __init__(
        self, device: int, kernels: tuple[int, int, int], num_ctas: int, tables_nbytes: int,
        high_priority: bool, samples: list[GpuSample] | None,
    ) -> None:
        """`kernels`: CUfunction or CUkernel of copy_vectors, copy_bulk and convert; 0: there is none.
        `samples` decide which copies use copy engines; []: none do, None: all that can."""
    def submit(
        self, program: GpuProgram, layers: tuple[int, int], src_ids: NDArray[np.uint32],
        dst_ids: NDArray[np.uint32], num_fine: int, src_address: int, dst_address: int, direction: int,
    ) -> int:
        """Returns a ticket; `done` shows when it has ended. Never waits: raises "again" if tables are full.
        `direction`: 0 to pinned host memory, 1 from there, 2 on the device, only by kernels."""
    @property
    def has_copy_engines(self) -> bool:
        """False if the driver has no calls for them, or the device has refused them."""
    @property
    def handle(self) -> int:
        """The CUstream."""
    def wait_for(self, event: int) -> None:
        """Makes later copies begin after that CUevent."""
    def done(self) -> int:
        """The ticket up to which all copies have ended, with visible bytes."""
    def check(self) -> None:
        """Raises if work on the device has failed."""
    def synchronize(self) -> None: ...
    def set_num_ctas(self, num_ctas: int) -> None: ...
    def close(self) -> None:
        """Waits for submitted copies."""

class PreparedList:
    """Prepared descriptors (native/raw_agent/descriptor_list.h)."""

    def __len__(self) -> int: ...
    @property
    def num_grids(self) -> int: ...

class RawRequest:
    """A request that pairs some of a remote agent's descriptors with ours; released when dropped."""

    def post(self, notify: bytes) -> Literal[0, 1]:
        """0: done; 1: under way."""
    def check(self) -> Literal[0, 1]: ...
    def release(self) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_descriptors(self) -> int: ...
    @property
    def num_transfers(self) -> int: ...
    @property
    def posted_ns(self) -> int: ...
    @property
    def begun_ns(self) -> int: ...
    @property
    def ended_ns(self) -> int: ...

class RawAgent:
    """native/raw_agent/agent.h. Rows are address, length and device: uint64 [N, 3].

    `prepare` also takes rows with a stride and a count: uint64 [N, 5].
    """

    def __init__(
        self, name: str, options: dict[str, Any], advertise: str, timeout_s: float, exchanges: bool
    ) -> None: ...
    def close(self, timeout_s: float) -> None: ...
    def register(self, rows: NDArray[np.uint64], is_gpu: bool) -> None: ...
    def deregister(self, rows: NDArray[np.uint64], is_gpu: bool) -> None: ...
    def metadata(self) -> bytes: ...
    def metadata_of(self, rows: NDArray[np.uint64], is_gpu: bool, with_address: bool) -> bytes: ...
    def invalidate(self) -> None: ...
    def add_remote(self, metadata: bytes) -> str: ...
    def remove_remote(self, name: str) -> None: ...
    def connect(self, name: str) -> None: ...
    def is_connected(self, name: str) -> bool: ...
    def has_remote(self, name: str, rows: NDArray[np.uint64], is_gpu: bool) -> bool: ...
    def prepare(self, of: str, rows: NDArray[np.uint64], is_gpu: bool) -> PreparedList: ...
    def make(
        self,
        is_write: bool,
        local: PreparedList,
        local_entries: NDArray[np.uint32] | None,
        remote: PreparedList,
        remote_entries: NDArray[np.uint32] | None,
    ) -> RawRequest: ...
    def tell(self, address: str, metadata: bytes) -> None: ...
    def ask(self, address: str, name: str) -> None: ...
    def withdraw(self, address: str) -> None: ...
    def advertise(self, address: str) -> None: ...
    @property
    def address(self) -> str: ...
    def notify(self, remote: str, payload: bytes) -> None: ...
    def take_notifications(self) -> list[tuple[str, bytes]]: ...

def descriptor_rows(tuples: list[tuple[object, ...]], width: int) -> NDArray[np.uint64]:
    """The first three fields of tuples of `width` fields, as rows."""
