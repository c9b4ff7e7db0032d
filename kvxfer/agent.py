"""The library's object in one process: lifetimes and verbs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvxfer._native import AgentCore, NativeError
from kvxfer.address import Address, published, published_towards
from kvxfer.arguments import check_kind, seconds
from kvxfer.directory.entry import Entry
from kvxfer.directory.protocol import Directory
from kvxfer.errors import AgentError, translate
from kvxfer.gpu.trigger import Trigger, trigger_of
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.log import logger
from kvxfer.message import Message
from kvxfer.notification import Notification
from kvxfer.options import AgentOptions
from kvxfer.peer import Peer
from kvxfer.region import Blocks, Region, RegionDescriptor
from kvxfer.session.accepting import Accepting
from kvxfer.session.completion import MESSAGE, NOTIFICATION, Completions
from kvxfer.session.connecting import Connecting
from kvxfer.session.drain import Drain, OnDraining
from kvxfer.session.inbox import Inbox
from kvxfer.session.name_lookup import NameLookup
from kvxfer.session.peer_table import PeerTable
from kvxfer.session.posting import Poster
from kvxfer.session.program_cache import ProgramCache
from kvxfer.session.publication import Publication
from kvxfer.session.region_table import RegionTable
from kvxfer.session.steering import Steering
from kvxfer.transfer import Incoming, Transfer

if TYPE_CHECKING:
    from kvxfer._native import Event
    from kvxfer.attachment.link import Attachment
    from kvxfer.gpu.command_ring import CommandRing
    from kvxfer.gpu.trigger import StartsAfter
    from kvxfer.lease_token import LeaseToken
    from kvxfer.session.stats import AgentStats


class Agent(Steering):
    """Moves blocks between registered memory of this process and of its peers.

    It listens from its making on, has one native progress thread, and uses no CPU when idle. Use
    it as a context manager, ``async with`` or ``with``. All methods may be called from any thread, and all
    that ask for something raise `AgentError` once it is ``closed``, or ``forked``: in a child process.
    A verb that waits is a coroutine; its blocking twin is called `verb_blocking` (`connect`,
    `connect_blocking`) and takes the same arguments, and a ``timeout_s`` where the coroutine leaves
    that to `asyncio.timeout`. A handle, such as a `Transfer`, is awaited itself; its twin is ``wait``.
    `close` and `aclose` alone are named as Python's libraries name them: `contextlib.closing` and many a
    hand call ``close()``, and a coroutine that nobody awaits would leave the agent open.
    No coroutine needs an own thread: any event loop, several, or none may use one agent.

    ``timeout_s=None`` stands for an option in `connect` (``connect_timeout_s``) and in what is posted, by
    `write`, `read`, `expect` and `CommandRing.prepare_write` (``transfer_timeout_s``). All other verbs that
    take None wait without bound; `close` and `aclose` take a number alone. When the time is over, a verb
    that waits raises `TimeoutError`, and what it waited for goes on. `connect` raises `PeerError` instead,
    as there is no session, and what was posted ends with ``deadline``.

    Parameters
    ----------
    name
        What peers call it, at most 128 bytes; unique where a directory is used.
    options
        How it behaves.
    listen, advertise, secret
        Taken instead of the options' when given.
    directory
        Where it publishes its `entry`, unless it accepts nobody, and looks up names to connect to. One that
        is slow or hangs costs the options' ``connect_timeout_s`` here, and holds up no other call.
    metadata
        What the directory tells others of it: at most 32 texts by name, 4096 bytes together.

    Raises
    ------
    UsageError
        An option does not fit, e.g. listening beyond loopback without a secret. ``unsupported``:
        The agent is to have a GPU, and kernels cannot run there, with the reason.
    AgentError
        The address cannot be listened on, or the system refuses a resource.
    Exception
        What the directory's ``publish`` raised; `PeerError` where it did not answer. There is no agent then.
    """

    def __init__(
        self,
        name: str,
        options: AgentOptions | None = None,
        *,
        listen: str | None = None,
        advertise: str | None = None,
        secret: bytes | str | None = None,
        directory: Directory | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        # Checked here, before anything is made.
        Entry(name, "", bytes(16), {} if metadata is None else metadata)
        check_kind(options, "options", AgentOptions | None, "an AgentOptions")
        check_kind(directory, "directory", Directory | None, "a kvxfer.directory.Directory")
        options = options or AgentOptions()
        if listen is not None:
            options = replace(options, listen=listen)
        if advertise is not None:
            options = replace(options, advertise=advertise)
        if secret is not None:
            options = replace(options, secret=secret)
        native = options.to_native()
        from kvxfer.attachment.runtime_folder import socket_of  # by pathlib, as options' secrets

        daemon = socket_of(options.daemon)
        if options.device is not None:
            from kvxfer.gpu import part

            native["gpus"] = [part.of_agent(options, options.device)]
        try:
            self._core = AgentCore(name, native)
        except NativeError as error:
            raise translate(error) from None
        except RuntimeError as error:  # of the C++ library
            raise AgentError(
                f"no thread can be started for agent {name!r}: {error}; raise ulimit -u and -v, and pids.max "
                "of its control group",
                code="system",
            ) from None
        self._publication: Publication | None = None
        self._attachment: Attachment | None = None
        try:
            self._start(name, options, directory, metadata or {})
        except BaseException:
            self._core.close(0.0)  # else it would go on for as long as the exception is kept
            with suppress(Exception):  # what was published in part, or will be late
                self._withdraw(0.0)
            raise
        if daemon is not None:
            from kvxfer.attachment.link import Attachment

            parts = self._core, self._entry, options, self._peers, self._regions, self._drain
            self._attachment = Attachment(daemon, *parts, agent=self)
            self._attachment.begin()

    def _start(
        self, name: str, options: AgentOptions, directory: Directory | None, metadata: Mapping[str, str]
    ) -> None:
        self._options = options
        address, note = published(self._core.address, options.advertise)
        if note:
            logger().warning("kvxfer: %s: %s", name, note)
        self._entry = Entry(name, address, self._core.incarnation, metadata)
        self._drain = Drain()
        self._names = NameLookup(directory)
        self._programs = ProgramCache(self._core)
        self._completions = Completions(self._core, name, options.spin_us, self._on_event)
        self._peers = PeerTable(self._core, self._completions)
        self._regions = RegionTable(self._core, self._completions, self._programs, name, address, options)
        self._notifications = Inbox(
            self._core.take_notification, Notification, NOTIFICATION, self._completions, self._peers, name
        )
        self._messages = Inbox(
            self._core.take_message, Message, MESSAGE, self._completions, self._peers, name
        )
        self._poster = Poster(self._core, self._completions, self._peers, self._programs, options)
        if directory is not None and address:
            self._publication = Publication(directory, self._entry, options.directory_ttl_s)
            self._publication.begin(options.connect_timeout_s)

    def __repr__(self) -> str:
        return f"<Agent {self.name!r} {self.address or 'accepts nobody'}>"

    # ---- lifetime ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What peers call it."""
        return self._entry.name

    @property
    def address(self) -> str:
        """Where others reach it, port filled in, e.g. ``"tcp://127.0.0.1:40321"``; ``""`` for nowhere.

        The options' ``advertise``, or else where it listens. Of an agent that listens on ``0.0.0.0`` or
        ``[::]`` it is the address of this host from which the default route left when the agent was made, or
        loopback, with a line in the log, where there is none; peers on other networks get `address_for`.
        """
        return self._entry.address

    def address_for(self, target: str | Peer | Entry | RegionDescriptor) -> str:
        """Returns where `target` reaches this agent, by the route there as it is now; sends nothing.

        The same as `address`, but for an agent that listens on ``0.0.0.0`` or ``[::]`` and advertises
        nothing, on a host with several networks. Of a peer that called it is not known where it is: that
        gets `address`.

        Parameters
        ----------
        target
            A peer, an agent's entry, a region's descriptor, or an address with a numeric host:
            ``"tcp://10.1.0.7:7301"``, where the port may be left out.

        Raises
        ------
        UsageError
            ``invalid-argument``: it is none of these, or has no numeric address. ``unsupported``: no route
            leads there.
        """
        what = "a Peer, an Entry, a RegionDescriptor or an address with a numeric host"
        check_kind(target, "target", str | Peer | Entry | RegionDescriptor, what)
        self._completions.check()
        far = target if isinstance(target, str) else target.address
        at = Address.parse(far, "target", port_needed=False) if far or isinstance(target, str) else None
        listening = self._core.address
        if at is None or not listening or self._options.advertise is not None:
            return self.address
        if not Address.parse(listening, "address").is_wildcard:
            return self.address
        return published_towards(listening, at)

    @property
    def entry(self) -> Entry:
        """Its name, address, incarnation and metadata: what directories have, in a form that travels."""
        return self._entry

    @property
    def incarnation(self) -> bytes:
        """16 random bytes: a restarted process is a new peer, even under the same name."""
        return self._core.incarnation

    @property
    def options(self) -> AgentOptions:
        """How it behaves."""
        return self._options

    @property
    def closed(self) -> bool:
        """Whether it can do nothing any more (closed, or in the child of a fork)."""
        return self._completions.lost

    @property
    def draining(self) -> float | None:
        """Until when it was asked to drain, by `time.monotonic`; None where it was not, or no longer is.

        The node's daemon asks (``kvxfer drain``; `AgentOptions.daemon`). The agent itself goes on as before:
        its owner takes on no new requests, and lets those that run end by then.
        """
        return self._drain.until

    def on_draining(self, callback: OnDraining) -> None:
        """Has `callback` called with `draining` whenever that changes.

        By a thread of the agent's, which it must not hold up. It is kept as long as the agent.
        """
        self._drain.call(callback)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends everything and says goodbye to peers. Idempotent.

        Transfers in flight end as failed with ``closed``, leases and regions are fenced, and the
        memory may be freed when this returns; memory on a GPU once peers have unmapped it, as
        `Region.deregister` says. Whoever still waits gets `AgentError`.

        Parameters
        ----------
        timeout_s
            How long goodbyes may take, and the directory with what is left of it. The fences do not depend on
            it; what the directory does later, the log tells.

        Raises
        ------
        UsageError
            `timeout_s` is no time. The agent is as it was.
        Exception
            What the directory's ``withdraw`` raised in that time; the agent is closed all the same.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        if self.closed:
            return
        begun = time.monotonic()
        try:
            self._end(timeout_s)
        finally:
            if self._completions.lost:
                self._withdraw(max(timeout_s - (time.monotonic() - begun), 0.0))

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """Closes without blocking the event loop: `close` in a thread.

        Cancelling it abandons the waiting alone: the close goes on in its thread, and the memory may not be
        freed before `closed` is true.

        Parameters
        ----------
        timeout_s
            As in `close`.

        Raises
        ------
        UsageError
            `timeout_s` is no time. The agent is as it was.
        Exception
            What the directory's ``withdraw`` raised in that time; the agent is closed all the same.
        """
        import asyncio

        timeout_s = seconds(timeout_s, "timeout_s")
        if not self.closed:
            # The readers of this loop must go from this loop.
            self._completions.stop_watching()
            await asyncio.to_thread(self.close, timeout_s)

    def _withdraw(self, timeout_s: float) -> None:
        if self._publication is not None:
            self._publication.end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        self._completions.stop_watching()
        try:
            self._core.close(timeout_s)
        finally:
            # An interrupt may come in between. Before the native end memory is served.
            if self._core.ended:
                self._shut()
                if self._attachment is not None:
                    self._attachment.end(timeout_s)

    def _shut(self) -> None:
        self._regions.let_go()
        self._programs.clear()
        self._peers.clear()
        self._completions.shut(
            AgentError(f"agent {self.name!r} is closed: make a new one", code="closed"),
        )

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as also:
            self._tell_also(also, error)

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except Exception as also:
            self._tell_also(also, error)

    def _tell_also(self, also: Exception, error: BaseException | None) -> None:
        """Raises what went wrong in closing, unless it would hide why the block was left."""
        if error is None:
            raise also
        logger().warning("kvxfer: closing %s: %r", self.name, also)

    # ---- regions ----------------------------------------------------------------------------

    def register(self, name: str, memory: Any, layout: KVLayout | None = None) -> Region:
        """Makes memory known to peers under a name, without a copy; grants nobody a right to it.

        Parameters
        ----------
        name
            At most 128 bytes, unique among this agent's regions.
        memory
            A torch tensor, a numpy array, anything with DLPack or the buffer protocol, or a list,
            tuple or dict of them. Kept alive until the region is deregistered. Tensors that touch
            become one range; gaps between tensors are never touched. All of it lies in memory of the
            host, or all on the agent's GPU (the options' ``gpu``; torch tensors, or what has
            ``__cuda_array_interface__``).
        layout
            Where the elements lie, counted from the lowest registered byte. It may be left out
            for one tensor of two axes, [blocks, elements of a block].

        Raises
        ------
        UsageError
            Read-only memory, a layout that reaches beyond the memory, a name in use. ``unsupported``:
            memory of a GPU, and kernels cannot run here, this agent has none or another.

        Notes
        -----
        Pages on a GPU move straight between GPUs of one machine, and else through pinned memory
        (`AgentOptions.staging_nbytes`), without ``integrity``: a transfer that nothing can bring raises
        ``unsupported`` when it is posted. Copies run on streams of their own and wait for no other: say by
        ``after=`` what writes the blocks, or still uses them.
        """
        return self._regions.register(name, memory, layout)

    @property
    def regions(self) -> Mapping[str, Region]:
        """This agent's regions by name; read-only."""
        return self._regions.by_name()

    # ---- peers ------------------------------------------------------------------------------

    async def connect(self, target: str | Entry | RegionDescriptor, timeout_s: float | None = None) -> Peer:
        """Opens a session with another agent, its rails and the list of its regions.

        Parameters
        ----------
        target
            ``"tcp://host:port"``, a name to look up in the directory, an agent's entry, or the descriptor of
            a region, for its owner. With whom the last three say the session is, or there is none; an entry
            or a descriptor returns the one that is open already. On one host the rails are shm and a unix
            socket all the same, and cuda_ipc where both ends name it.
        timeout_s
            For looking up and connecting together; None takes the options' ``connect_timeout_s``.

        Raises
        ------
        PeerError
            ``unreachable``, ``auth-failed``, ``protocol``, ``peer-lost``: the message says what was tried.
            ``peer-restarted``: another incarnation answered than the one that was meant.
        UsageError
            ``invalid-argument``: no address, a name and no directory, or an address beyond loopback and no
            secret. ``layout-mismatch``: a region that both ends call by one name holds caches that no copy
            program can bridge; the message compares them field by field. The session has ended.

        docs/errors.md has every code.
        """
        with self._connecting(target, timeout_s) as connecting:
            return await connecting.wait()

    def connect_blocking(
        self, target: str | Entry | RegionDescriptor, timeout_s: float | None = None
    ) -> Peer:
        """Opens a session with another agent: the blocking twin of `connect`."""
        with self._connecting(target, timeout_s) as connecting:
            return connecting.wait_blocking()

    def _connecting(self, target: str | Entry | RegionDescriptor, timeout_s: float | None) -> Connecting:
        return Connecting(
            self._core,
            self._completions,
            self._peers,
            self._regions,
            self._names,
            target,
            timeout_s,
            self._options.connect_timeout_s,
        )

    async def accept(self, name: str | None = None, timeout_s: float | None = None) -> Peer:
        """Waits until a peer is connected and returns it.

        Parameters
        ----------
        name
            The peer's name. Returns its newest session that is open, whichever side called, so also one that
            this agent dialled; any number of callers get the same. None takes the oldest open session that a
            peer has called for and that was returned to nobody yet, by a name or without: each goes to one
            caller, and those that this agent dialled to none.
        timeout_s
            None waits without bound.

        Raises
        ------
        UsageError
            ``invalid-argument``: `name` is no text.
        TimeoutError
            No such peer came in time.
        """
        return await self._accepting(name).wait(timeout_s)

    def accept_blocking(self, name: str | None = None, timeout_s: float | None = None) -> Peer:
        """Blocks until a peer is connected: the twin of `accept`."""
        return self._accepting(name).wait_blocking(timeout_s)

    def _accepting(self, name: str | None) -> Accepting:
        check_kind(name, "name", str | None, "a peer's name, or None for the next that calls")
        return Accepting(self._completions, self._peers, self.name, self.address, name)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Peers that are connected, the newest session last."""
        return self._peers.open()

    # ---- transfers --------------------------------------------------------------------------

    def write(
        self,
        region: Region,
        remote_region: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        after: StartsAfter | None = None,
        notify: bytes = b"",
        timeout_s: float | None = None,
        priority: int = 0,
        integrity: bool | None = None,
        lease: LeaseToken | None = None,
        context: str | bytes = "",
        hold: bool = False,
    ) -> Transfer:
        """Posts a copy of blocks of `region` into blocks of a peer's region. Returns at once.

        The peer must have let these blocks be written: by a lease, or by ``expect`` of `notify`
        (whichever of the two sides comes first waits for the other until its deadline; `expect` says what of
        the other's is over). The pages must stay as they are until the transfer ends.

        Parameters
        ----------
        region
            Where the bytes come from.
        remote_region
            Where they go: ``peer.regions[name]``.
        src_blocks, dst_blocks
            Block ids of the two regions, in the order of the sequence's tokens. Where both ends have
            pages of one size they are equally many and ``src_blocks[i]`` goes to ``dst_blocks[i]``;
            else they cover the same tokens. A source block may be repeated, a destination block may
            not; a destination's null block takes nothing.
        layers
            Consecutive layers, numbered model-wide as in `KVLayout`; None for all that both ends
            hold. Like `heads` and `tokens` a range, which costs nothing, or the numbers themselves.
        heads
            Consecutive KV heads, numbered model-wide; None for all that both ends hold. For heads
            that several ranks hold, of which one is to move them (`kvxfer.plan.route`).
        tokens
            Which tokens of the sequence move, ``range(first, stop)``; both tables begin at its token
            0. None for all that both tables name, whole blocks where pages are equal. Exactly these
            are written: a last block that is filled in part keeps the rest of its bytes.
        after
            Delays the first byte only: the transfer is posted at once, finds its lease and counts its time.
            Not together with `hold`. One of:

            - A `Trigger`; ``trigger.by_layer()`` where layers become final one by one.
            - A stream or an event of torch or cuda.core, of this agent's GPU: what is enqueued in the stream
              by now, or was when the event was recorded. Neither may be of a graph's capture: record a
              trigger there.
            - An asyncio or concurrent future; the transfer is cancelled when it fails.
        notify
            Delivered to the peer when all bytes are visible there, or the tag of its ``expect``;
            at most 4096 bytes.
        timeout_s
            Both ends are final by then; None takes the options' ``transfer_timeout_s``.
        priority
            0 to 255; 0 goes first. With the option ``verbs.classes`` it says over which queue pairs, too.
        integrity
            Whether a crc32c of every piece is checked before the end; None as in the options.
        lease
            The lease that is meant, by the token that the peer handed over (`Lease.token`); no other then
            allows it. None: any that lets these blocks be reached, but where one ended on them earlier,
            none that this agent had not been told of when it posted: ``lease-ended`` says so. So pass the
            token wherever blocks are used again. A lease that was granted to a name, or to anybody, lets
            in only reads that name it.
        context
            Whose request it is, e.g. a request's id or a W3C trace parent: at most 256 bytes of UTF-8, as
            text or as bytes. It travels to the peer; handles, notifications, errors and log lines of both
            ends name it. Each end that gave one keeps its own; one that gave none has the other's.
        hold
            Post, but let layers go only as `Transfer.release` says: for a prefill that is still
            computing them. Not together with `after`.

        Raises
        ------
        UsageError
            Nothing was posted: ids out of range or repeated at the destination, tables of
            different length, layouts that do not fit; both `after` and `hold`; a region, descriptor, token
            or trigger of another agent. ``unsupported``: a region lies on a GPU and no rail brings its
            pages, or `integrity` was asked for there.
        RailError
            ``rail-failed``: the rails that bring its pages are lost, and dialled again.
        PeerError
            The peer is lost, or no session is open with the agent that a descriptor is of (``unreachable``).

        docs/errors.md has every code, and what awaiting the transfer raises.

        Notes
        -----
        One call into native code where whole blocks in all layers go between the same two regions as in the
        call before. One more for another pair of regions, and for `layers`, `heads` or `tokens`; one more
        for a stream or an event. A descriptor that came by `RegionDescriptor.from_bytes` takes two more each
        time, as its session is looked up. `tokens`, and pages that differ in size, also pair units in
        Python, microseconds for a request. The copy program is compiled, and told to the peer, once for each
        pair of regions (and `heads`).

        A transfer that waits for what a GPU or another process stores takes a few percent of one processor
        (native/DESIGN.md).
        """
        return self._poster.transfer(
            region,
            remote_region,
            src_blocks,
            dst_blocks,
            layers,
            heads,
            tokens,
            notify,
            timeout_s,
            priority,
            integrity,
            lease,
            context,
            write=True,
            after=after,
            hold=hold,
        )

    def read(
        self,
        region: Region,
        remote_region: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        after: StartsAfter | None = None,
        notify: bytes = b"",
        timeout_s: float | None = None,
        priority: int = 0,
        integrity: bool | None = None,
        lease: LeaseToken | None = None,
        context: str | bytes = "",
    ) -> Transfer:
        """Posts a copy of blocks of a peer's region into blocks of `region`. Returns at once.

        A lease of the peer must let these blocks be read. Layers may be waited for one by one
        (`Transfer.layer`); `notify` reaches the peer when all bytes are here, so that it can free
        its blocks.

        Parameters
        ----------
        region
            Where the bytes go.
        remote_region
            Where they come from: ``peer.regions[name]``.
        src_blocks, dst_blocks
            Block ids of the remote and of the local region, as in `write`.
        layers, heads, tokens, after, notify, timeout_s, priority, integrity, lease, context
            As in `write`. `after` is for blocks that something here still uses: the peer is asked at once,
            and its lease has to last until the bytes may land.

        Raises
        ------
        UsageError, RailError, PeerError
            As in `write`; docs/errors.md has every code.
        """
        return self._poster.transfer(
            region,
            remote_region,
            src_blocks,
            dst_blocks,
            layers,
            heads,
            tokens,
            notify,
            timeout_s,
            priority,
            integrity,
            lease,
            context,
            write=False,
            after=after,
            hold=False,
        )

    def explain(self, region: Region, remote_region: RegionDescriptor) -> str:
        """Returns in some lines what a `read` and a `write` between the two regions would do. Posts nothing.

        For people; later versions may say it otherwise. It says which runs of bytes move and what happens to
        their elements, over which rails they come here in the order in which those are chosen, and why: which
        are far from the memory here, and pass memory of the host. Where a NIC moves them it says by READ or
        WRITE, with the rates of both where that is measured. Then what stands in the `notes` of both regions.
        Costs what compiling two copy programs does.

        Raises
        ------
        UsageError
            As `write`: a region is gone, or is another agent's.
        PeerError
            Its peer is lost.
        """
        from kvxfer.session.explanation import explain

        try:
            return explain(self._core, self._poster.peer_of(region, remote_region), region, remote_region)
        except NativeError as error:
            raise translate(error, peer=remote_region.agent) from None

    def trigger(self, memory: Any = None) -> Trigger:
        """Returns a word at 0 that transfers of this agent can wait for (``after=``).

        Parameters
        ----------
        memory
            4 writable bytes, e.g. ``numpy.frombuffer(shared.buf, numpy.uint32, 1)`` of memory that other
            processes have mapped; they stay exported for as long as a transfer waits. Triggers over the same
            bytes are one word, also of several agents. None takes a word of this process, in pinned memory
            where the agent has a GPU.

        Raises
        ------
        UsageError
            ``length-mismatch``: `memory` has another size; ``invalid-argument``: it cannot be written to.
        """
        self._completions.check()
        return trigger_of(self._completions, memory)

    def command_ring(self, num_commands: int = 1024) -> CommandRing:
        """Returns a ring of commands, by which kernels start writes that were prepared in it.

        Parameters
        ----------
        num_commands
            How many it has room for: a power of two, 2**20 at most. As many transfers of the ring's are under
            way at a time; beyond both a kernel is told that the ring is full.

        Raises
        ------
        UsageError
            Another size.
        AgentError
            ``system``: there is no such memory.

        Notes
        -----
        In pinned memory and a few bytes of the agent's GPU, 16 bytes a command; in the process's own memory,
        for its threads, where the agent has none.
        """
        from kvxfer.gpu.command_ring import ring_of

        return ring_of(self._core, self._completions, self._poster, num_commands)

    def expect(
        self,
        tag: bytes,
        blocks: Blocks,
        region: Region | None = None,
        *,
        layers: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        peer: Peer | None = None,
        timeout_s: float | None = None,
        context: str | bytes = "",
    ) -> Incoming:
        """Lets transfers that carry `tag` as ``notify`` write these blocks, and follows them.

        May come before or after the peer's write. What is over is told, and not waited for:

        - A write whose tag was expected until that was cancelled, or ended by its time, is refused at once
          with that code, where no lease lets it write. To expect the tag again begins anew.
        - Where a write of the tag waited here and ended before this call (its source cancelled it, its time
          was over, its peer was lost) and no other waits, this fails at once with what happened to that. The
          next write of the tag begins anew, and so does the next call of this.

        Tags are remembered for that in bounds, the oldest forgotten first: 4096 tags and 1 MiB of those that
        this agent gave up, as much of each session, and as much of all sessions together that have ended. An
        expectation that was done is not remembered: its tag may be used again at once.

        Parameters
        ----------
        tag
            1 to 4096 bytes, e.g. a request's id; unique among what is expected now.
        blocks
            Block ids of `region`, distinct.
        region
            May be left out when the agent has one.
        layers
            Consecutive layers, numbered model-wide; None for all of the region.
        tokens
            Which tokens of the sequence have to arrive, of all the region's heads and whoever brings
            them, until it is complete; `blocks` begin at its token 0. None for all of the blocks.
        peer
            Who may write; None for any peer.
        timeout_s
            It fails when not everything has arrived by then; None takes the options'
            ``transfer_timeout_s``.
        context
            As in `write`: whose request it is, at this end.

        Raises
        ------
        UsageError
            Ids out of range or repeated, layers or tokens that the region does not hold, no tag or one in
            use, no `region` and the agent has none or several; a region or peer of another agent.
            ``unknown-region``: it was deregistered.
        PeerError
            `peer` is lost.

        docs/errors.md has every code, and what awaiting it raises.
        """
        self._completions.check()
        if region is None:
            region = self._regions.only()
        return self._poster.expectation(tag, blocks, region, layers, tokens, peer, timeout_s, context)

    # ---- notifications, messages and progress ------------------------------------------------

    def notifications(self) -> AsyncIterator[Notification]:
        """Yields notifications as they arrive, each to one reader; ends when the agent closes.

        Those that nobody reads are kept. A peer whose unread ones come to a bound has its next transfer
        with a notification refused in words; of peers that are lost the newest 16,384 are kept.
        """
        return self._notifications.stream()

    async def notification(self, timeout_s: float | None = None) -> Notification:
        """Waits until a notification is there and returns it; each goes to one reader.

        Cancelling it loses none.

        Parameters
        ----------
        timeout_s
            None waits without bound.

        Raises
        ------
        TimeoutError
            None came in time.
        AgentError
            The agent closed.
        """
        return await self._notifications.next(timeout_s)

    def notification_blocking(self, timeout_s: float | None = None) -> Notification:
        """Blocks until a notification is there and returns it: the twin of `notification`."""
        return self._notifications.next_blocking(timeout_s)

    def take_notification(self) -> Notification | None:
        """Takes the oldest notification that nobody has read; None where there is none. Never waits."""
        return self._notifications.take()

    def messages(self) -> AsyncIterator[Message]:
        """Yields messages that peers sent by `Peer.send`, each to one reader; ends when the agent closes.

        Messages of one peer come in the order of their sending. Unread ones are kept: up to 1 MiB for each
        peer, which cannot send more until some are read. Of peers that are lost the newest 16,384 are kept,
        and no more than 64 MiB.
        """
        return self._messages.stream()

    async def message(self, timeout_s: float | None = None) -> Message:
        """Waits until a message is there and returns it; each goes to one reader.

        Cancelling it loses none.

        Parameters
        ----------
        timeout_s
            None waits without bound.

        Raises
        ------
        TimeoutError
            None came in time.
        AgentError
            The agent closed.
        """
        return await self._messages.next(timeout_s)

    def message_blocking(self, timeout_s: float | None = None) -> Message:
        """Blocks until a message is there and returns it: the twin of `message`."""
        return self._messages.next_blocking(timeout_s)

    def take_message(self) -> Message | None:
        """Takes the oldest message that nobody has read; None where there is none. Never waits."""
        return self._messages.take()

    def poll(self) -> bool:
        """Drives progress once from this thread, without blocking; for synchronous engine loops.

        While a thread polls, the agent's own thread keeps out of its way. Returns whether
        anything moved or came in.
        """
        return self._completions.poll()

    def stats(self) -> AgentStats:
        """Returns counters since the agent's making, and what is held for whom: cheap, while it is open."""
        self._completions.check()
        try:
            return {**self._core.stats(), "programs": len(self._programs), "peers": self._peers.budgets()}
        except NativeError as error:
            raise translate(error) from None

    # ---- inside -----------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if event.kind == "peer-up":
            self._peers.get(event.peer)  # so that descriptors of its regions find it
        elif event.kind == "peer-lost":
            self._peers.forget(event.peer)
            self._programs.forget_peer(event.peer)
            logger().info("kvxfer: %s lost a peer: %s", self.name, event.message)
        elif event.kind == "region-gone":
            self._programs.forget_peer(event.peer, event.region)
        elif event.kind == "log":
            logger().warning("kvxfer: %s: %s", self.name, event.message)
