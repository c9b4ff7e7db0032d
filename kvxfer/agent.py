"""The library's object in one process: lifetimes and verbs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any

from kvxfer._native import AgentCore, NativeError
from kvxfer.address import Address, published, published_towards
from kvxfer.arguments import check_kind, seconds
from kvxfer.directory.entry import Entry
from kvxfer.directory.protocol import Directory
from kvxfer.errors import AgentError, translate
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.log import beside, logger
from kvxfer.message import Message
from kvxfer.notification import Notification
from kvxfer.options import AgentOptions
from kvxfer.peer import Peer
from kvxfer.region import Region
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.session.completion import MESSAGE, NOTIFICATION, Completions
from kvxfer.session.dials import Dials
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
from kvxfer.threads import in_thread

if TYPE_CHECKING:
    from kvxfer._native import Event
    from kvxfer.daemon_link.link import DaemonLink
    from kvxfer.session.stats import AgentStats


class Agent(Meeting, Moving, Receiving, Steering):
    """Moves blocks between registered memory of this process and of its peers.

    An agent listens as soon as it is made. It has one native progress thread, and uses no CPU when idle. Use
    it as a context manager, ``async with`` or ``with``. All methods may be called from any thread. Methods
    that need a working agent raise `AgentError`: ``closed`` once the agent is closed, and ``forked`` in a
    child process. A verb that waits is a coroutine; its blocking twin is called `verb_blocking` (`connect`,
    `connect_blocking`) and takes the same arguments, and a ``timeout_s`` where the coroutine leaves that to
    `asyncio.timeout`. A handle, such as a `Transfer`, is awaited itself; its twin is ``wait``. `close` is the
    one exception: it blocks, and its coroutine is `aclose`. `contextlib.closing` and many programs call
    ``close()``; if that were a coroutine and it was not awaited, the agent would stay open. Coroutines need
    no thread of their own. One event loop, several, or none may use an agent.

    ``timeout_s=None`` stands for an option in `connect` and `Peer.region` (``connect_timeout_s``) and in what
    is posted, by `write`, `read`, `expect` and `CommandRing.prepare_write` (``transfer_timeout_s``). All
    other verbs that take None wait without bound; `close` and `aclose` take only a number. When the time is
    over, a verb that waits raises `TimeoutError`, and the operation that it waited for goes on. That of
    `connect` is a `NoAnswerError`, because there is no session. Posted work ends with ``deadline``, which is
    no `TimeoutError`: its pages are free.

    Parameters
    ----------
    name
        The agent's name among its peers, 1 to 128 bytes in UTF-8; unique where a directory is used.
    options
        How it behaves.
    listen, advertise, secret
        When given, they replace the values in `options`.
    directory
        Where the agent publishes its `entry`, unless it accepts no peers, and where it looks up names to
        connect to. A slow or hanging directory delays this constructor by at most the options'
        ``connect_timeout_s``, and no other call.
    metadata
        What the directory tells other agents about this one: at most 32 texts by name, 4096 bytes together.

    Raises
    ------
    UsageError
        An option does not fit, e.g. listening beyond loopback without a secret. ``unsupported``: the options
        ask for a GPU, but kernels cannot run there, or for a transport that is off; the message has the
        reason.
    AgentError
        The address cannot be listened on, or the system refuses a resource.
    Exception
        What the directory's ``publish`` raised; `NoAnswerError` if it did not answer. In both cases no agent
        was made.
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
        from kvxfer.daemon_link.runtime_folder import socket_of  # by pathlib, as options' secrets

        daemon = socket_of(options.daemon)
        if options.gpu_in_use is not None:
            from kvxfer.gpu import part

            native["gpus"] = [part.of_agent(options, options.gpu_in_use)]
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
        self._daemon_link: DaemonLink | None = None
        try:
            self._start(name, options, directory, metadata or {})
        except BaseException:
            self._core.close(0.0)  # else it would go on for as long as the exception is kept
            with suppress(Exception):  # what was published in part, or will be late
                self._withdraw(0.0)
            raise
        if daemon is not None:
            from kvxfer.daemon_link.link import DaemonLink

            parts = self._core, self._entry, options, self._peers, self._regions, self._drain
            self._daemon_link = DaemonLink(daemon, *parts, agent=self)
            self._daemon_link.begin()

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
        self._peers = PeerTable(self._core, self._completions, options.connect_timeout_s)
        self._dials = Dials(self._core, self._peers)
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
        """The agent's name among its peers."""
        return self._entry.name

    @property
    def address(self) -> str:
        """Address at which peers reach this agent, e.g. ``"tcp://127.0.0.1:40321"``; ``""`` for none.

        It is the options' ``advertise``, or else the address that the agent listens on. For an agent that
        listens on ``0.0.0.0`` or ``[::]`` it is the address of this host from which the default route left
        when the agent was made. Without a default route it is loopback, and a line in the log says so. Give
        `address_for` to peers on other networks.
        """
        return self._entry.address

    def address_for(self, target: str | Peer | Entry | RegionDescriptor) -> str:
        """Returns the address at which `target` reaches this agent now; sends nothing.

        The routes of this host decide. The result differs from `address` only for an agent that listens on
        ``0.0.0.0`` or ``[::]`` and advertises nothing, on a host with several networks. The location of a
        peer that called this agent is unknown; for it the result is `address`.

        Parameters
        ----------
        target
            A peer, an agent's entry, a region's descriptor, or an address with a numeric host:
            ``"tcp://10.1.0.7:7301"``, where the port may be left out.

        Raises
        ------
        UsageError
            ``invalid-argument``: `target` is none of these, or has no numeric address. ``unsupported``: there
            is no route to it.
        """
        what = "a Peer, an Entry, a RegionDescriptor, or an address with a numeric host"
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
        """The agent's name, address, incarnation and metadata: its directory entry, which can be sent."""
        return self._entry

    @property
    def incarnation(self) -> bytes:
        """16 random bytes: a restarted process is a new peer, even under the same name."""
        return self._core.incarnation

    @property
    def options(self) -> AgentOptions:
        """The agent's options."""
        return self._options

    @property
    def closed(self) -> bool:
        """Whether the agent can no longer be used (closed, or in the child of a fork)."""
        return self._completions.lost

    @property
    def draining(self) -> float | None:
        """When the agent should be drained, by `time.monotonic`; None while no drain is requested.

        The node's daemon requests it (``kvxfer drain``; `AgentOptions.daemon`). The agent itself goes on as
        before. The program that owns the agent should take on no new requests, and let its running ones end
        by then.
        """
        return self._drain.until

    def on_draining(self, callback: OnDraining) -> None:
        """Calls `callback` with `draining` whenever that changes.

        A thread of the agent calls it, so `callback` must not block. The agent keeps `callback` for its
        lifetime.
        """
        self._drain.call(callback)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends everything and says goodbye to peers. Idempotent.

        Transfers in flight fail with ``closed``, and leases and regions are fenced. When this returns, host
        memory may be freed. GPU memory may be freed once peers have unmapped it, as `Region.deregister` says.
        Calls that still wait raise `AgentError`.

        Parameters
        ----------
        timeout_s
            How long the goodbyes may take. The directory gets the time that they leave; if it fails later,
            the log says so. The fences do not depend on this time.

        Raises
        ------
        UsageError
            `timeout_s` is not a valid time. The agent is unchanged.
        Exception
            What the directory's ``withdraw`` raised in that time. The agent is closed nevertheless.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        if self.closed and not self._completions.is_broken:
            return
        begun = time.monotonic()
        try:
            self._end(timeout_s)
        finally:
            if self._completions.lost:
                self._withdraw(max(timeout_s - (time.monotonic() - begun), 0.0))

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """Closes without blocking the event loop: `close` in a thread.

        Cancelling abandons only the waiting. The close goes on in its thread, and the memory must not be
        freed before `closed` is true.

        Parameters
        ----------
        timeout_s
            As in `close`.

        Raises
        ------
        UsageError
            `timeout_s` is not a valid time. The agent is unchanged.
        Exception
            What the directory's ``withdraw`` raised in that time. The agent is closed nevertheless.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        if not self.closed or self._completions.is_broken:
            # An event loop's readers must be removed from within that loop.
            self._completions.stop_watching()
            await in_thread(self.close, timeout_s)

    def _withdraw(self, timeout_s: float) -> None:
        if self._publication is not None:
            self._publication.end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        self._completions.stop_watching()
        try:
            self._core.close(timeout_s)
        finally:
            # An interrupt may arrive before the native agent has ended. Until then it still serves the
            # memory.
            if self._core.ended:
                self._shut()
                if self._daemon_link is not None:
                    self._daemon_link.end(timeout_s)

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
        with beside(error, f"closing {self.name}"):
            self.close()

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with beside(error, f"closing {self.name}"):
            await self.aclose()

    # ---- regions ----------------------------------------------------------------------------

    def register(self, name: str, memory: Any, layout: KVLayout | None = None) -> Region:
        """Makes memory known to peers under a name, without a copy. Grants no right to it.

        Parameters
        ----------
        name
            1 to 128 bytes in UTF-8, unique among this agent's regions.
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
            Read-only memory, a name in use, or blocks of more than 1 GiB in one layer. ``length-mismatch``:
            the layout reaches beyond the memory. ``unsupported``: GPU memory, but kernels cannot run here, or
            the agent has no GPU or another one.

        Notes
        -----
        GPU pages move directly between GPUs of one machine, and otherwise through pinned memory
        (`AgentOptions.staging_nbytes`). They move without ``integrity``. A transfer that no rail can carry
        raises ``unsupported`` when it is posted. Copies run on streams of their own and do not wait for other
        streams. Pass the work that writes the blocks, or still uses them, as ``after=``.
        """
        return self._regions.register(name, memory, layout)

    @property
    def regions(self) -> Mapping[str, Region]:
        """This agent's regions by name; read-only."""
        return self._regions.by_name()

    # ---- progress ---------------------------------------------------------------------------

    def poll(self) -> bool:
        """Drives progress once from this thread, without blocking; for synchronous engine loops.

        While a thread polls, the agent's own thread leaves progress to it. Returns whether anything moved or
        arrived.
        """
        return self._completions.poll()

    def stats(self) -> AgentStats:
        """Returns counters since the agent was made, and what it holds for each peer.

        Cheap. The agent must be open.
        """
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


def _name_verbs_as_callers_know_them() -> None:
    """Has a wrong call of a verb say ``Agent.write()``, also where the verb is of a part of the class."""
    for part in (Meeting, Moving, Receiving, Steering):
        for name, verb in vars(part).items():
            if isinstance(verb, FunctionType):
                verb.__qualname__ = f"{Agent.__name__}.{name}"


_name_verbs_as_callers_know_them()
