"""The library's object in one process: lifetimes and verbs."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.log import logger
from kvxfer.message import Message
from kvxfer.notification import Notification
from kvxfer.options import AgentOptions
from kvxfer.peer import Peer
from kvxfer.region import Region, RegionDescriptor
from kvxfer.session.completion import MESSAGE, NOTIFICATION, Completions
from kvxfer.session.drain import Drain, OnDraining
from kvxfer.session.inbox import Inbox
from kvxfer.session.meeting import Meeting
from kvxfer.session.moving import Moving
from kvxfer.session.name_lookup import NameLookup
from kvxfer.session.peer_table import PeerTable
from kvxfer.session.posting import Poster
from kvxfer.session.program_cache import ProgramCache
from kvxfer.session.publication import Publication
from kvxfer.session.receiving import Receiving
from kvxfer.session.region_table import RegionTable
from kvxfer.session.steering import Steering
from kvxfer.shared_secret import SecretOption

if TYPE_CHECKING:
    from kvxfer._native import Event
    from kvxfer.attachment.link import Attachment
    from kvxfer.session.stats import AgentStats


class Agent(Meeting, Moving, Receiving, Steering):
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
        secret: SecretOption | None = None,
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
        self._tls = native.get("tls")
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

    # ---- progress ---------------------------------------------------------------------------

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
