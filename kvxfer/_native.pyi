"""Reference of the compiled module: the agent's native half.

Conversion only; what is a number here gets its meaning in the Python package. No call holds the
GIL while it waits or while bytes move. Times are seconds as float, timestamps are nanoseconds of
CLOCK_MONOTONIC, sizes are bytes. A failing call raises ``NativeError(code, message)``, with
``code`` one of native/include/kvxfer/status.h; ``kvxfer.errors.translate`` makes the public
exception of it.
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
#: "avx512-nt", "avx2-nt" or "memcpy": what the copy executor chose on this machine.
COPY_KERNEL: Final[str]
#: sizeof(CopyLoop), for the check of plan.program.LOOP_DTYPE.
COPY_LOOP_NBYTES: Final[int]
MIN_STAGING_NBYTES: Final[int]
CONVERSION_NBYTES: Final[int]
#: "avx512", "avx2" or "scalar": what converts dtypes on this machine.
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
        """What the kernel gave."""
    @property
    def seals(self) -> tuple[str, ...]:
        """Seals in force, e.g. ``("grow", "shrink", "future-write", "seal")``."""
    def array(self) -> NDArray[np.uint8]:
        """All bytes, writable, no copy; keeps this object alive."""

class Handle:
    """One end of a transfer, or an expectation (the receiver's handle of what peers will write)."""

    @property
    def id(self) -> int: ...
    @property
    def state(self) -> Literal["pending", "done", "failed", "cancelled"]:
        """The last three are final."""
    @property
    def code(self) -> int:
        """Why it ended; 0 while pending and when done."""
    @property
    def message(self) -> str: ...
    @property
    def context(self) -> str:
        """As its caller named the request; where it did not, as the other end last did; "" for none."""
    @property
    def failed_blocks(self) -> NDArray[np.uint32]:
        """This end's block ids whose bytes cannot be relied on. Empty unless failed or cancelled."""
    @property
    def rails(self) -> tuple[str, ...]:
        """Transports that moved bytes of it, as seen at this end: a source does not see what is fetched
        from it (loopback, shm). "eager" for what went with its OFFER."""
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
        """Asks for one LAYER event for ``layer``; True when it is in already (no event then)."""
    def layers_ready(self, layers: int) -> None:
        """Source of a write: the first ``layers`` layers are final and may be fetched."""
    def cancel(self) -> None:
        """Ends it; asynchronous: the state is final when the last byte can no longer move."""
    @property
    def gpu(self) -> int:
        """The index of the agent's GPU; -1 without one."""
    def wait_in(self, stream: int, layer: int | None) -> StreamWait:
        """Has a CUstream wait for the end, or for ``layer``. Never leaves it behind."""

class StreamWait:
    """What a stream waits for; dropping it changes nothing for the stream."""

    @property
    def outcome(self) -> int:
        """0 pending, 1 done, 2 failed, 3 cancelled."""
    @property
    def address(self) -> int:
        """Of the outcome, 4 bytes that a GPU reads, while this object is there."""

class Event:
    """One entry of the completion ring."""

    @property
    def kind(self) -> str:
        """``"ended"`` (handle), ``"layer"`` (handle, layer), ``"notification"`` and ``"message"`` (one or more
        came), ``"room"`` (peer: for messages), ``"peer-up"``, ``"peer-lost"`` (peer, code, message),
        ``"region"``, ``"region-gone"`` (peer, region), ``"lease-ended"`` (peer, lease, code: one that this
        agent granted), ``"lease-told"`` (lease: see `AgentCore.await_told`), ``"commands"`` (handle: the
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
    """A word of 4 bytes that says how far something is; `AgentCore.trigger` and `trigger_over` make one."""

    @property
    def value(self) -> int: ...
    def fire(self, value: int) -> None:
        """Stores a value that is more than what is there, and wakes every agent that waits for it."""
    def reset(self) -> None: ...
    def share(self) -> int:
        """Its address, for others to store to: those who wait look at it from now on."""

class After:
    """Layer k of a transfer may go once ``trigger.value >= first + k * step``, all at once for a step of 0."""

    def __init__(self, trigger: Trigger, first: int, step: int) -> None: ...

def trigger_over(memory: Any) -> Trigger:
    """One over a writable buffer of 4 bytes, exported for as long as anybody waits for it."""

class Route:
    """A program of a peer and some of its layers, ready to be posted."""

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
        """Posts a write or a read, whichever the program is for. Ids of units (kvxfer/plan/units.py), the last
        ``num_fine`` of tokens. Nothing was posted when it raises: NativeError, what ``as_ids`` raises,
        or TypeError for what is of another kind."""

class CommandRing:
    """A ring of commands at its host; `AgentCore.command_ring` makes one."""

    @property
    def id(self) -> int:
        """``handle`` of the "commands" events that say that one of its commands has ended."""
    @property
    def address(self) -> int:
        """Of the CommandRing of native/include/kvxfer/command.h, where kernels reach it."""
    @property
    def num_commands(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def counts(self) -> tuple[int, int, int]:
        """Commands that were taken, have ended, have failed; each is a part of the one before."""
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
        """The number by which commands name pairs of these tables. ``first_layer``: what they call the
        route's first; ``terms`` of each write, whose ``hold`` is not looked at."""
    def forget(self, prepared: int) -> None: ...
    def start(self, prepared: int, pair: int, layer: int, num_pairs: int) -> bool:
        """As kvxfer/device.cuh's, with one look, where the ring is in the process's own memory."""
    def take_failures(self) -> list[tuple[int, int, int, int, int, int, str]]:
        """Index of the command, number of the prepared write, pair, number of pairs, layer, code, message;
        the newest 1024 that were not taken yet."""
    def wait(self, num_ended: int, timeout_s: float) -> bool:
        """As ``Handle.wait``, until so many have ended."""
    def close(self) -> None:
        """When it returns nothing more is taken out of the ring."""

class AgentCore:
    """An agent: its sockets, its progress thread, its tables.

    ``options`` is a dict with exactly these keys (kvxfer/options.py: AgentOptions gives defaults):
    ``listen`` ("tcp://127.0.0.1:0", or "" to accept nobody), ``secret`` (bytes, b"" for none),
    ``second_secret`` (bytes: accepted as well, b"" for none), ``user_secret`` (bytes, b"" where there is another),
    ``secret_file`` (absolute path from which both were read, and are read again; "" for none),
    ``transports`` (list of names that `transports` tells), ``require`` (list of those without which no session
    goes on), ``transport_options`` (dict: bool, int or str by
    names that it tells, e.g. "tcp.rails"), ``gpus`` (list of a dict for each GPU of the agent, one at most:
    ``device``, its index; ``kernels``, a CUfunction or 0 for each of copy_vectors, copy_bulk and convert;
    ``owner``, what they belong to, which is kept as long as they may be launched; ``ipc_ctas`` and
    ``staging_ctas``, most of a kernel that copies there, between GPUs and to stage; ``staging_nbytes``, of
    pinned memory for pages of that GPU that go over streams, 0 for none; ``way_samples``, a list of
    `GpuSample`, by which staging goes by copy engines),
    ``silent_timeout_s``, ``heartbeat_interval_s``, ``handshake_timeout_s``, ``lease_margin_s``, ``spin_us`` (int),
    ``integrity`` (bool), ``max_transfers_per_peer``, ``eager_nbytes`` and ``copy_threads`` (int), ``faults`` (str,
    "" or the seed and rates of kvxfer.testing).
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None: ...
    @property
    def address(self) -> str:
        """Where it listens, port filled in; "" when it accepts nobody."""
    @property
    def incarnation(self) -> bytes: ...
    @property
    def event_fd(self) -> int:
        """Readable while events wait, once armed by a ``drain(arm=True)`` that returned an empty list."""
    def drain(self, max_events: int = 256, arm: bool = True) -> list[Event]: ...
    def add_waiters(self, change: int) -> None:
        """``change`` more wait for "ended", "layer", "commands", "notification", "message", "room" or
        "lease-told" events; none are made while nobody does. Whoever is to wait says so, and then
        looks once more at what it waits for."""
    def take_notification(self) -> tuple[int, bytes, str] | None:
        """The oldest notification that nobody has read (peer, payload, context). Of peers that are lost the newest
        16384 are kept; the first time that one is dropped a "log" event says so."""
    def take_message(self) -> tuple[int, bytes] | None:
        """The oldest message (peer, payload), likewise. Once for each quarter of what may wait the sender is told."""
    def send(self, peer: int, payload: bytes) -> None:
        """Sends a message. Raises NativeError(kExhausted) where there is no room: a "room" event follows when
        there is more."""
    def has_room(self, peer: int, nbytes: int) -> bool:
        """For a message of so many bytes; a "room" event follows where not."""
    @property
    def sockets_fd(self) -> int:
        """Readable while sockets have something for ``serve``."""
    @property
    def serves(self) -> bool:
        """Whether a loop gains by it: all sessions are of this host, their frames in shared memory."""
    def serve(self) -> bool:
        """Does what is short of what made ``sockets_fd`` readable. False: whoever drives has it, or the
        agent's thread (or the agent is closed); look away until the ring has told something."""
    def leave(self) -> None:
        """The loop that served looks away: the agent's thread has the sockets again, at once."""
    def poll(self) -> int:
        """Drives progress once without blocking. 0: nothing moved; 1: something moved or came in; 2: and
        there are events to drain."""
    def close(self, timeout_s: float) -> None:
        """Fences and ends everything, says goodbye to peers, joins the thread. Idempotent; by a second thread it
        returns when the first has ended."""
    @property
    def ended(self) -> bool:
        """Whether ``close`` has: no memory is served any more."""
    def stats(self) -> CoreStats: ...

    # Records of transfers (kvxfer/session/records.py decodes them). What each costs, and who may call it:
    # native/DESIGN.md.
    def watch_records(self, capacity: int) -> int:
        """From now on each end of a transfer and each expectation that ends leaves a record, of which the
        newest ``capacity`` (65,536 at most) are kept. 0: none any more.

        Returns a descriptor of the agent's, the same each time: readable while there are records, or something
        else has changed since they were taken. It is written once when the first comes, not for each."""
    def take_records(self, max_records: int = 256) -> bytes:
        """Takes the oldest records. From any thread, and after ``close``, without the gate."""
    def note_change(self) -> None:
        """Counts a change that native code does not know of, e.g. of the names of regions."""
    @property
    def num_changes(self) -> int:
        """How often peers came or went, they or this agent registered or lost regions, or leases were granted or
        ended."""
    def open_transfers(self, most: int) -> bytes:
        """Records of what is open and of what drains: sources, destinations, then expectations. What begins or ends
        meanwhile may be missing."""
    def cancel_transfer(self, peer: int, transfer: int, is_source: bool) -> bool:
        """Cancels this end of a transfer, whichever end posted it; the other fails with code "cancelled",
        or "lease-ended" where it finds first that the source's pages are its own again.
        False: it is not open (any more). It ends, and leaves its record, when its works have."""
    def leases(self, most: int) -> list[dict[str, Any]]:
        """Leases that this agent granted and that have not ended, in the order of their numbers: ``lease``,
        ``holder`` (name; of a bearer's the names that may be it, "" for any), ``peer`` (None: its bearer's),
        ``region``, ``mode`` ("read" or "write"), ``num_blocks`` (None: the whole region), ``state`` ("active",
        or "ending" while works under it are under way), ``seconds_left``."""

    # Regions. `spans`: int64 [n, 2] of address and nbytes, ascending. `footprint`: the loops
    # (plan.program.LOOP_DTYPE; the dst half is used) that say which bytes block 0 of each layer owns.
    def register(
        self, name: str, spans: NDArray[np.int64], num_blocks: int, footprint: NDArray[np.void], layout: bytes,
        device: int, owner: object,
    ) -> int:
        """``device``: index of the GPU that it lies on, -1 for memory of the host.

        ``owner`` keeps the memory: it is let go by ``deregister`` or ``close``, whatever else is dropped."""
    def region_kind(self, region: int) -> Literal["pool", "foreign", "gpu"]: ...
    def region_notes(self, region: int) -> list[str]:
        """Sentences on the rails that cannot reach it, and why."""
    def region_node(self, region: int) -> int:
        """The NUMA node that its host memory lies on; -1: several, or none is known, or it made no difference."""
    def deregister(self, region: int, timeout_s: float) -> bool:
        """Fences: when it returns True no byte of the region is touched. Its transfers fail.

        False: a device still copies there after that long (below 0: without end); called again it
        waits on."""

    # Peers: a peer is one session.
    def begin_connect(self, address: str, timeout_s: float) -> int:
        """Begins a session. A "peer-up" event follows when it is open, its rails are up and its regions are
        known, or "peer-lost". A host's name is looked up before it returns."""
    def disconnect(self, peer: int, code: int = ..., text: str = ...) -> None: ...
    def peer(self, peer: int) -> dict[str, Any]:
        """``name``, ``incarnation`` (bytes), ``state`` ("connecting", "open", "lost"), ``is_ours`` (this
        agent called), ``rails``
        (list of "shm", "tcp", ..., alive), ``paths`` (list of sentences: devices and addresses of rails that
        have their own), ``notes`` (list of sentences: what was tried and is
        not used, and why), ``code``, ``message``; until it is lost ``budget``: by resource ("bytes",
        "mapped bytes", "descriptors", "fence slots", "events", "message bytes") what it holds and how much it may.
        Raises NativeError(kPeerLost) for one that was lost, and 64 others since."""
    def peers(self) -> list[int]: ...

    # What peers are limited to, by their names, whether a session is open with them or not.
    def renew_certificates(self, files: dict[str, Any]) -> None:
        """Reads the files of ``tls`` anew; connections that begin from now on use them. May block on the disk."""
    def set_secrets(self, first: bytes, second: bytes) -> None:
        """Replaces both for sessions that begin from now on; ``second`` may be b""."""
    def reload_secrets(self) -> None:
        """The same, from ``secret_file``. May block on the disk."""
    def limit_peer(self, name: str, max_bytes_per_s: int, least_priority: int) -> None:
        """Replaces what that name was limited to; 0 and 0 take it away. NativeError(kExhausted): 4096 names are."""
    def peer_limits(self) -> list[tuple[str, int, int]]:
        """Name, bytes a second (0: any) and least priority number of each that is limited, by name."""
    def switch_rails(self, transport: str, on: bool) -> None:
        """Rails of one transport, in all sessions. Off: they go down, and none comes up. NativeError(kUnsupported):
        a session would end; nothing was done. kInvalidArgument: the agent has no such transport."""
    def rails_off(self) -> list[str]: ...
    def peer_regions(self, peer: int) -> list[dict[str, Any]]:
        """``id``, ``name``, ``base``, ``nbytes``, ``num_blocks``, ``layout`` (bytes), ``path``
        (the transport that will be used, "" for none yet), ``notes``."""

    def ways(self, peer: int, region: int, remote: int, converts: bool) -> list[dict[str, Any]]:
        """Of each rail that is up, those over which pages come from a peer's region to ours in the order in which
        they are chosen, then the others: ``transport``, ``path`` (as of ``paths``, without its name),
        ``rank`` (those of the lowest are chosen while one is up), ``is_far`` (from our region's memory),
        ``is_staged`` (through the host's memory here), ``why_not`` ("" where they can come)."""

    # A program between a local and a remote region; `write`: the source is local.
    def install_program(self, program: Program) -> int:
        """The number of a program that is checked here and told to the peer."""

    def route(
        self,
        peer: int,
        program: int,
        first_layer: int,
        num_layers: int,
        timeout_s: float,
        integrity: bool,
        as_ids: Callable[[Any], NDArray[np.uint32]],
    ) -> Route:
        """Transfers of a program's ``num_layers`` layers from ``first_layer`` on; ``timeout_s`` and
        ``integrity`` of those that name none; ``as_ids`` turns other block ids into uint32."""

    # Words that transfers wait for. ``stream`` and ``event`` are handles of the driver, of this agent's GPU.

    def trigger(self) -> Trigger:
        """In pinned memory where the agent has a GPU."""
    def command_ring(self, num_commands: int) -> CommandRing:
        """In pinned memory and on the GPU where the agent has one. A power of two, 2**20 at most."""
    def record(self, trigger: Trigger, stream: int, value: int) -> None:
        """Has a stream store to a trigger of `trigger`, after what it was given before."""
    def after_stream(self, stream: int) -> After: ...
    def after_event(self, event: int) -> After: ...
    def expect(self, expected: Expected) -> Handle:
        """Lets transfers whose ``notify`` equals its tag write the blocks, and is done when all of it has
        arrived."""

    # Leases that this agent grants.
    def grant(self, grant: Grant) -> int:
        """The lease's number: counted, or of a bearer's below 2**63 and not to be guessed."""
    def extend_lease(self, lease: int, ttl_s: float) -> bool:
        """It lasts for so long from now on, or longer where it would have; its holder is not told. False: it has
        ended."""
    def revoke(self, lease: int, timeout_s: float) -> bool:
        """Fences: when it returns True no byte moves under the lease. Idempotent.

        False: a device still copies under it after that long (below 0: without end)."""
    def await_told(self, lease: int) -> bool:
        """False: its holder has not heard of it; a "lease-told" event follows when it has, or when the lease
        ends before. True also where nobody is told, and of one that has ended."""
    def lease_state(self, lease: int) -> str:
        """``"active"``, ``"ending"``, ``"revoked"``, ``"expired"``, ``"peer-lost"``, ``"region-gone"``. Raises
        NativeError(kInvalidArgument) for one that ended, and 4096 others since."""

def transports() -> list[dict[str, Any]]:
    """Those of this build, in the order of their registration: what native/include/kvxfer/transport_kind.h
    says of each (kvxfer.session.transport_registry.TransportKind); ``options`` is a dict by their whole names, ``why_off`` is
    of an agent without a GPU, ``devices`` a tuple of sentences."""
def check_transports(names: list[str], options: dict[str, Any]) -> None:
    """Raises where an agent could not be made with these: ``transports`` and ``transport_options``."""
def close_agents() -> None:
    """Ends all agents of the process for good; called at the interpreter's exit."""

# What callers pass. `name` is the argument's, for the error.
def to_seconds(value: Any, name: str) -> float:
    """0 to 1e9: any number that is 0 or more, numpy's too. Raises NativeError(kInvalidArgument) for all else."""
def to_count(value: Any, name: str, low: int, high: int, what: str = "") -> int:
    """A whole number, numpy's too. Raises NativeError(kInvalidArgument) for what is none, a bool, or not `low` to
    `high`; `what` it should be, in words, where those would not say it."""
def crc32c(data: bytes) -> int: ...
def sha256(data: bytes) -> bytes: ...
def siphash128(key: bytes, data: bytes) -> bytes: ...
def decode_frame(frame: bytes) -> str:
    """For the fuzz test: the message's type name, or raises NativeError(kProtocol)."""
def kernel_tls() -> tuple[Literal["nothing", "one-key", "new-keys"], str]:
    """What the kernel offers for encrypting pages over TCP, and why it is nothing. Tried once, a second at most."""

# A program run by itself, one layer of it. `units`: (src_units, dst_units, src_tokens, dst_tokens).
Units = tuple[int, int, int, int]

def expand(
    loops: NDArray[np.void], layer: int, src_ids: NDArray[np.uint32], dst_ids: NDArray[np.uint32],
    num_fine: int = 0, units: Units = ...,
) -> NDArray[np.uint64]:
    """The runs [n, 3] (src_offset, dst_offset, nbytes at the source), as every executor sees them."""
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
    """What crosses a stream: gathered and converted at the source."""
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
    """Why this process has no CUDA driver, in words; None where it has."""
def gpu_pool_check(device: int) -> None:
    """Raises where no GPU memory can be made there that other processes can map."""
def gpu_pool_failure() -> str:
    """Why the last allocation of ``kvxfer_gpu_allocate`` failed; "" for none since the last call."""
def gpu_pool_nbytes(device: int) -> int:
    """Allocated there now, rounded up as the device wants it."""
def gpu_pool_handles(device: int) -> str:
    """How others map it: "fabric" (or by descriptor), "descriptor"; "" before the first allocation."""
def gpu_export(address: int) -> tuple[int, int, int, bytes, int]:
    """The allocation that an address of a GPU lies in, for other processes: kind (1 fabric, 2 descriptor,
    3 IPC), its first address, its nbytes, 64 bytes of a handle, a descriptor that is the caller's (-1:
    none)."""

class GpuPeerMapping:
    """Such an allocation of another process's, which kernels of this one may store to."""

    def __init__(self, device: int, kind: int, nbytes: int, handle: bytes, fd: int) -> None:
        """``fd`` stays the caller's."""
    @property
    def address(self) -> int:
        """Of the allocation's first byte, here; 0 once closed."""
    def close(self) -> None:
        """Waits for the device, then unmaps."""

def gpu_atoms(
    num_layers: int, loops: NDArray[np.void], conversions: NDArray[np.void], scales: NDArray[np.float32],
    units: Units, layers: tuple[int, int], src_ids: NDArray[np.uint32], dst_ids: NDArray[np.uint32],
    num_fine: int, src_address: int, dst_address: int, bulk: bool,
) -> NDArray[np.uint64]:
    """What lanes of a GPU move, [n, 4]: kernel, src_offset, dst_offset, nbytes at the source.

    By the header that the kernels compile, on the host. `layers`: the first, and how many.
    """

# What the same bytes took by kernels and by copy engines: direction (0: to the host, 1: to the device), form
# (0: runs, 1: rows of a 2-D copy), alignment, run_nbytes, kernel_ns, engine_ns.
GpuSample = tuple[int, int, int, int, int, int]

# What so many bytes took by kernels: direction, num_ctas, nbytes, ns.
GpuCtaSample = tuple[int, int, int, int]

def gpu_calibrate(
    device: int, kernels: tuple[int, int, int]
) -> tuple[list[GpuCtaSample], list[GpuSample], str | None]:
    """Measures for a second at most: by CTAs, by ways, and why there are no copy engines where there are none;
    [] for what there was no time. Raises where there is no memory, or the device fails."""
def gpu_staging_ctas(samples: list[GpuCtaSample]) -> int:
    """How many CTAs staging takes by these, in any order; 4 by none. Raises "invalid-argument" for what cannot
    have been measured."""
def gpu_least_runs(samples: list[GpuSample]) -> list[tuple[int, int, int, int | None]]:
    """Direction, form, looseness (0: 16 bytes, 1: 8) and from which bytes of a run on engines are taken. Raises
    "invalid-argument" for what cannot have been measured."""

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
        `samples`: by which copies go by copy engines; []: none do, None: all that can."""
    def submit(
        self, program: GpuProgram, layers: tuple[int, int], src_ids: NDArray[np.uint32],
        dst_ids: NDArray[np.uint32], num_fine: int, src_address: int, dst_address: int, direction: int,
    ) -> int:
        """Returns a ticket; `done` tells when it has ended. Never waits: "again" where tables are full.
        `direction`: 0 to pinned memory of the host, 1 from there, 2 on the device, by kernels alone."""
    @property
    def has_copy_engines(self) -> bool:
        """False where the driver has no calls for them, or the device has refused them."""
    @property
    def handle(self) -> int:
        """The CUstream."""
    def wait_for(self, event: int) -> None:
        """What is submitted from now on begins after that CUevent."""
    def done(self) -> int:
        """Tickets up to this have ended, and their bytes are seen."""
    def check(self) -> None:
        """Raises where work on the device has failed."""
    def synchronize(self) -> None: ...
    def set_num_ctas(self, num_ctas: int) -> None: ...
    def close(self) -> None:
        """Waits for what was submitted."""

class DoorList:
    """Descriptors that were prepared (native/door/descriptor_list.h)."""

    def __len__(self) -> int: ...
    @property
    def num_grids(self) -> int: ...

class DoorRequest:
    """Some of a remote agent's descriptors, and ours; released when it goes."""

    def post(self, notify: bytes) -> Literal[0, 1]:
        """0: it is done; 1: it is under way."""
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

class Door:
    """native/door/agent.h. Rows are address, length and device: uint64 [N, 3]."""

    def __init__(self, name: str, options: dict[str, Any], advertise: str, timeout_s: float) -> None: ...
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
    def prepare(self, of: str, rows: NDArray[np.uint64], is_gpu: bool) -> DoorList: ...
    def make(
        self,
        is_write: bool,
        local: DoorList,
        local_entries: NDArray[np.uint32] | None,
        remote: DoorList,
        remote_entries: NDArray[np.uint32] | None,
    ) -> DoorRequest: ...
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
