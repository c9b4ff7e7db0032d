"""The library's object in one process: lifetimes and verbs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from kvxfer._native import AgentCore, NativeError
from kvxfer.address import Address, published, published_towards
from kvxfer.arguments import check_kind, count, flag, seconds
from kvxfer.directory.entry import Entry
from kvxfer.directory.protocol import Directory
from kvxfer.errors import AgentError, invalid, translate
from kvxfer.gpu.trigger import Trigger, trigger_of
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.log import beside, logger
from kvxfer.message import Message
from kvxfer.naming import check_name
from kvxfer.notification import Notification
from kvxfer.options import AgentOptions
from kvxfer.peer import Peer
from kvxfer.peer_limit import LAST_PRIORITY, MOST_BYTES_PER_S, PeerLimit
from kvxfer.region import Blocks, Region
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.session.accepting import Accepting
from kvxfer.session.completion import MESSAGE, NOTIFICATION, Completions
from kvxfer.session.connecting import Connecting
from kvxfer.session.dials import Dials
from kvxfer.session.drain import Drain, OnDraining
from kvxfer.session.inbox import Inbox
from kvxfer.session.name_lookup import NameLookup
from kvxfer.session.peer_table import PeerTable
from kvxfer.session.posting import Poster
from kvxfer.session.program_cache import ProgramCache
from kvxfer.session.publication import Publication
from kvxfer.session.region_table import RegionTable
from kvxfer.shared_secret import SecretOption, given_secrets
from kvxfer.threads import in_thread
from kvxfer.transfer import Incoming, Transfer

if TYPE_CHECKING:
    from kvxfer._native import Event
    from kvxfer.daemon_link.link import DaemonLink
    from kvxfer.gpu.command_ring import CommandRing
    from kvxfer.gpu.trigger import StartsAfter
    from kvxfer.lease_token import LeaseToken
    from kvxfer.session.stats import AgentStats


class Agent:
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

    # ---- peers ------------------------------------------------------------------------------

    async def connect(self, target: str | Entry | RegionDescriptor, timeout_s: float | None = None) -> Peer:
        """Returns the session with another agent; opens it, its rails and the list of its regions if needed.

        An agent has one session with each incarnation of another, however many callers connect, at once or
        one after another: a request handler may connect for each request. Callers that ask at once share one
        attempt. Cancelling one of them leaves it to the others; when the last one leaves, it is given up. So
        `Peer.disconnect` ends the session for all who use it.

        Parameters
        ----------
        target
            ``"tcp://host:port"``, a name to look up in the directory, an agent's entry, or a region's
            descriptor, which stands for its owner. A name, an entry or a descriptor identifies the agent: the
            session is with that agent, or connecting fails. For an address it is the session with the agent
            that answered there before, while that is open. Between agents on one host the rails are shm and a
            unix socket whatever the address, and cuda_ipc if both ends name it.
        timeout_s
            Limit for looking up and connecting together; None takes the options' ``connect_timeout_s``.

        Raises
        ------
        PeerError
            ``unreachable``, ``no-answer`` (`NoAnswerError`, also a `TimeoutError`), ``auth-failed``,
            ``protocol``, ``peer-lost``: the message says what was tried.
            ``peer-restarted``: the agent that answered has another incarnation than `target`.
        UsageError
            ``invalid-argument``: `target` is not an address, is a name while the agent has no directory, or
            is beyond loopback while the agent has no secret. ``layout-mismatch``: both ends have a region of
            the same name, but no copy program can connect their caches. The message compares the layouts
            field by field. The session has ended.

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
            self._dials,
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
            The peer's name. The result is the newest open session with that peer, whether the peer called or
            this agent did; every caller gets the same one. None takes the oldest open session that a peer
            opened and that no `accept` has returned yet. Each such session goes to one caller. Sessions that
            this agent opened are skipped.
        timeout_s
            None waits without bound.

        Raises
        ------
        UsageError
            ``invalid-argument``: `name` is no name: text of 1 to 128 bytes in UTF-8.
        TimeoutError
            No such peer came in time.
        """
        return await self._accepting(name).wait(timeout_s)

    def accept_blocking(self, name: str | None = None, timeout_s: float | None = None) -> Peer:
        """Blocks until a peer is connected: the twin of `accept`."""
        return self._accepting(name).wait_blocking(timeout_s)

    def _accepting(self, name: str | None) -> Accepting:
        check_kind(name, "name", str | None, "a peer's name, or None for the next peer that calls")
        if name is not None:
            check_name(name, "name")
        return Accepting(self._completions, self._peers, self._entry.name, self._entry.address, name)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Connected peers, the newest session last."""
        return self._peers.open()

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

    # ---- transfers --------------------------------------------------------------------------

    def write(
        self,
        region: Region,
        remote_region: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        layers: range | None = None,
        heads: range | None = None,
        tokens: range | None = None,
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

        The peer must permit the write: by a lease, or by calling ``expect`` with the tag `notify`. `write`
        and ``expect`` may come in either order; the first waits for the second until its deadline (`expect`
        explains what happens if the other one has already ended). Do not change the source pages until the
        transfer ends.

        Parameters
        ----------
        region
            The region that the bytes come from.
        remote_region
            The region that they go to: ``peer.regions[name]``.
        src_blocks, dst_blocks
            Block ids of the two regions, in the order of the sequence's tokens. If both ends have pages of
            one size, the two lists have the same length, and ``src_blocks[i]`` goes to ``dst_blocks[i]``.
            Otherwise they cover the same tokens. A source block may be repeated, a destination block may not.
            Nothing is written to the destination's null block.
        layers
            ``range(first, stop)``, numbered model-wide as in `KVLayout`; None for all that both ends hold.
        heads
            ``range(first, stop)``, numbered model-wide; None for all that both ends hold. Use it when several
            ranks hold the same heads and only one of them should move them (`kvxfer.plan.route`).
        tokens
            The tokens of the sequence that move, ``range(first, stop)``. Both tables begin at the sequence's
            token 0. None for all tokens that both tables cover; these are whole blocks if the page sizes are
            equal. No other tokens are written: a partly filled last block keeps the rest of its bytes.
        after
            Delays the first byte only. Posting, finding the lease and the deadline start at once. Not
            together with `hold`. One of:

            - A `Trigger`, or ``trigger.by_layer()`` if layers become final one by one.
            - A stream or an event of torch or cuda.core, on this agent's GPU. The transfer waits for the work
              that is in the stream now, or that was in it when the event was recorded. Neither may belong to
              a graph's capture: record a trigger there.
            - An asyncio or concurrent future; if it fails, the transfer is cancelled.
        notify
            Payload that the peer receives when all bytes are visible there, or the tag of the peer's
            ``expect``; at most 4096 bytes.
        timeout_s
            Deadline by which both ends are final; None takes the options' ``transfer_timeout_s``.
        priority
            0 to 255; 0 goes first. With the option ``verbs.classes`` it also selects the queue pairs.
        integrity
            Whether a crc32c of every piece is checked before the transfer ends; None takes the option.
        lease
            The token of the lease to use (`Lease.token`), which the peer sent; no other lease then permits
            the transfer. None: any lease that permits access to these blocks. If an earlier lease on these
            blocks has ended, only leases that this agent knew of when it posted count; otherwise the transfer
            fails with ``lease-ended``. So pass the token wherever blocks are reused. A lease that was granted
            to a name or to None permits only reads that pass its token.
        context
            Identifies the request, e.g. by its id or a W3C trace parent: at most 256 bytes of UTF-8, as text
            or as bytes. The peer gets it too; handles, notifications, errors and log lines of both ends name
            it. An end that gave a context keeps its own; an end that gave none shows the other's.
        hold
            Whether to post now and move layers only as `Transfer.mark_ready` says, for a prefill that
            is still computing them. Not together with `after`.

        Raises
        ------
        UsageError
            Nothing was posted. The cause is: ids out of range or repeated at the destination; tables of
            different length; layouts that do not fit; both `after` and `hold`; or a region, descriptor, token
            or trigger of another agent. ``unsupported``: a region lies on a GPU, and no rail carries its
            pages, or `integrity` was requested.
        RailError
            ``rail-failed``: the rails that carry the pages are lost. They are dialled again.
        PeerError
            The peer is lost, or there is no open session with the descriptor's owner (``unreachable``).

        docs/errors.md lists every code, and what awaiting the transfer raises.

        Notes
        -----
        Takes one call into native code if whole blocks in all layers go between the same two regions as in
        the previous call. Another pair of regions, or `layers`, `heads` or `tokens`, takes one more; a stream
        or an event takes one more. A descriptor from `RegionDescriptor.from_bytes` takes two more each time,
        to look up its session. With `tokens`, or pages that differ in size, Python also pairs units, which
        takes microseconds for a request. The copy program is compiled and sent to the peer once for each pair
        of regions (and `heads`).

        A transfer that waits for a GPU or another process to store a word takes a few percent of one
        processor (native/DESIGN.md).
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
        layers: range | None = None,
        heads: range | None = None,
        tokens: range | None = None,
        after: StartsAfter | None = None,
        notify: bytes = b"",
        timeout_s: float | None = None,
        priority: int = 0,
        integrity: bool | None = None,
        lease: LeaseToken | None = None,
        context: str | bytes = "",
        hold: bool = False,
    ) -> Transfer:
        """Posts a copy of blocks of a peer's region into blocks of `region`. Returns at once.

        A lease of the peer must permit reading these blocks. You can wait for layers one by one
        (`Transfer.layer`). The peer gets `notify` when all bytes are here, so that it can free its blocks.

        Parameters
        ----------
        region
            The region that the bytes go to.
        remote_region
            The region that they come from: ``peer.regions[name]``.
        src_blocks, dst_blocks
            Block ids of the remote and of the local region, as in `write`.
        layers, heads, tokens
            As in `write`.
        after
            As in `write`. Use it if local work still uses the destination blocks. The request goes to the
            peer at once, so its lease must last until the bytes may land.
        notify
            Payload that the peer receives when all bytes are here; at most 4096 bytes.
        timeout_s
            Deadline by which both ends are final; None takes the options' ``transfer_timeout_s``.
        priority
            0 to 255; 0 goes first.
        integrity
            Whether a crc32c of every piece is checked; None takes the option.
        lease
            The token of the lease to use (`Lease.token`), which the peer sent. Required for a lease that was
            granted to a name or to None; pass it wherever blocks are reused, as `write` explains.
        context
            Identifies the request, as in `write`.
        hold
            Whether to post now and let layers land only as `Transfer.mark_ready` says, as `after` does.

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
            hold=hold,
        )

    def explain(self, region: Region, remote_region: RegionDescriptor) -> str:
        """Describes in some lines what a `read` and a `write` between two regions would do. Posts nothing.

        For people; later versions may word it differently. The text names the runs of bytes that move and
        what happens to their elements. It lists the rails over which they come here, in the order of choice,
        with the reasons: which rails are far from the memory here, and which go through host memory. If a NIC
        moves them, it says whether by READ or WRITE. The `notes` of both regions follow. Costs as much as
        compiling two copy programs.

        Raises
        ------
        UsageError
            As in `write`: a region is gone, or belongs to another agent.
        PeerError
            Its peer is lost.
        """
        from kvxfer.session.explanation import explain

        try:
            return explain(self._core, self._poster.peer_of(region, remote_region), region, remote_region)
        except NativeError as error:
            raise translate(error, peer=remote_region.agent) from None

    def trigger(self, memory: Any = None) -> Trigger:
        """Returns a trigger: a word, now 0, that transfers of this agent can wait for (``after=``).

        Parameters
        ----------
        memory
            4 writable bytes, e.g. ``numpy.frombuffer(shared.buf, numpy.uint32, 1)`` of memory that other
            processes have mapped. The buffer stays exported as long as a transfer waits. Triggers over the
            same bytes are one word, even of several agents. None takes a word of this process, in pinned
            memory if the agent has a GPU.

        Raises
        ------
        UsageError
            ``length-mismatch``: `memory` has another size. ``invalid-argument``: it is not writable.
        """
        self._completions.check()
        return trigger_of(self._completions, memory)

    def command_ring(self, num_commands: int = 1024) -> CommandRing:
        """Returns a ring of commands with which kernels start writes that were prepared in it.

        Parameters
        ----------
        num_commands
            Room for commands, and the most transfers of the ring that are under way at a time: a power of
            two, 2**20 at most. Beyond either limit a kernel finds the ring full.

        Raises
        ------
        UsageError
            `num_commands` is another number.
        AgentError
            ``system``: the memory cannot be allocated.

        Notes
        -----
        The ring takes 16 bytes a command in pinned memory, and a few bytes on the agent's GPU. If the agent
        has no GPU, the ring is in the process's own memory, for its threads.
        """
        from kvxfer.gpu.command_ring import ring_of

        return ring_of(self._core, self._completions, self._poster, num_commands)

    def expect(
        self,
        tag: bytes,
        blocks: Blocks,
        region: Region | None = None,
        *,
        layers: range | None = None,
        tokens: range | None = None,
        peer: Peer | None = None,
        timeout_s: float | None = None,
        context: str | bytes = "",
    ) -> Incoming:
        """Permits writes whose ``notify`` is `tag` into these blocks, and returns a handle on them.

        `expect` may come before or after the peer's write. If one of the two has already ended, the other
        fails at once instead of waiting:

        - The expectation was cancelled or timed out, and the write comes afterwards: the write is refused at
          once with that code, unless a lease permits it. Calling `expect` again with the tag starts anew.
        - A write with the tag waited here and ended before this call (its source cancelled it, its time was
          over, or its peer was lost), and no other write waits: the expectation fails at once with that
          write's error. The next write with the tag, or the next call of `expect`, starts anew.

        The agent remembers such tags within bounds, and forgets the oldest first: 4096 tags and 1 MiB for
        expectations that it gave up, as much for each session, and as much for all ended sessions together.
        Expectations that are done are not remembered: their tags may be used again at once.

        Parameters
        ----------
        tag
            1 to 4096 bytes, e.g. a request's id; unique among the pending expectations.
        blocks
            Block ids of `region`, distinct. Expectations may share blocks; then a later write replaces the
            bytes of an earlier one.
        region
            The region of `blocks`; may be left out if the agent has only one.
        layers
            ``range(first, stop)``, numbered model-wide; None for all of the region.
        tokens
            The tokens of the sequence that must arrive, in all of the region's heads and from any writer,
            before the expectation is done. `blocks` begin at the sequence's token 0. None for all tokens of
            the blocks. This bounds completion alone: the right to write is for the whole blocks.
        peer
            The peer that may write; None for any peer.
        timeout_s
            The expectation fails if something is missing by then; None takes the options'
            ``transfer_timeout_s``.
        context
            As in `write`: identifies the request, at this end.

        Raises
        ------
        UsageError
            Ids are out of range or repeated; the region does not hold the layers or tokens; the tag is empty
            or in use; `region` was left out, but the agent has none or several; or a region or peer belongs
            to another agent. ``unknown-region``: the region was deregistered.
        PeerError
            `peer` is lost.

        docs/errors.md lists every code, and what awaiting the handle raises.
        """
        self._completions.check()
        if region is None:
            region = self._regions.only()
        return self._poster.expectation(tag, blocks, region, layers, tokens, peer, timeout_s, context)

    # ---- notifications and messages ---------------------------------------------------------

    def notifications(self) -> AsyncIterator[Notification]:
        """Yields notifications as they arrive, each to one reader; ends when the agent closes.

        Unread notifications are kept. When a peer's unread notifications reach a limit, its next transfer
        with a notification is refused with a message. Of lost peers the newest 16,384 are kept.
        """
        return self._notifications.stream()

    async def notification(self, timeout_s: float | None = None) -> Notification:
        """Waits for a notification and returns it; each goes to one reader.

        Cancelling loses no notification.

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
        """Takes the oldest unread notification; None if there is none. Never waits."""
        return self._notifications.take()

    def messages(self) -> AsyncIterator[Message]:
        """Yields messages that peers sent by `Peer.send`, each to one reader; ends when the agent closes.

        Messages of one peer come in the order of sending. Unread messages are kept, up to 1 MiB for each
        peer; the peer cannot send more until some are read. Of lost peers the newest 16,384 are kept, and no
        more than 64 MiB.
        """
        return self._messages.stream()

    async def message(self, timeout_s: float | None = None) -> Message:
        """Waits for a message and returns it; each goes to one reader.

        Cancelling loses no message.

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
        """Takes the oldest unread message; None if there is none. Never waits."""
        return self._messages.take()

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

    # ---- settings while it runs -------------------------------------------------------------

    def limit(self, peer: Peer | str, *, max_bytes_per_s: int | None = None, least_priority: int = 0) -> None:
        """Limits all present and future peers of one name; replaces earlier limits.

        The agent keeps limits for its lifetime, or until `unlimit`. At least one must be named.

        Parameters
        ----------
        peer
            The name, or a `Peer` that has it. Sessions with peers of one name share the rate.
        max_bytes_per_s
            Bytes of pages a second that this agent takes from these peers, over all rails; None for no limit.
            A piece (some 512 KiB) waits for its turn and moves as a whole. The limit also applies to
            transfers that are under way. To limit what this agent sends, set a limit at the other end,
            because the owner of the destination schedules. Pages that come with the frame that offers them
            (``eager_nbytes``) cannot be delayed: they are counted, and later pieces wait longer. Messages are
            not counted.
        least_priority
            Lowest priority number of transfers that this agent posts with these peers from now on. A smaller
            ``priority`` is raised to it, so that the transfer goes no earlier. 0 changes nothing.

        Raises
        ------
        UsageError
            ``invalid-argument``: `peer` is not a name or a peer, the rate or the priority is out of range, or
            neither is given.
        ExhaustedError
            4096 other names have limits already.

        Notes
        -----
        A limit does not extend deadlines: a transfer that becomes late ends with ``deadline``, and the
        message names the rate. Leases, fences, cancelling and the loss of a peer work as without a limit. A
        peer that waits for its rate costs other peers nothing.
        """
        name = _name_of(peer)
        rate = (
            0 if max_bytes_per_s is None else count(max_bytes_per_s, "max_bytes_per_s", 1, MOST_BYTES_PER_S)
        )
        least = count(least_priority, "least_priority", 0, LAST_PRIORITY)
        if not rate and not least:
            raise invalid(
                f"no limit is given for {name!r}: name one, or call unlimit to remove all", peer=name
            )
        self._set_limits(name, rate, least)

    def unlimit(self, peer: Peer | str) -> None:
        """Removes the limits of all peers of one name; a running transfer goes on at once.

        Without limits nothing changes. Raises ``invalid-argument`` if `peer` is not a name or a peer.
        """
        self._set_limits(_name_of(peer), 0, 0)

    def _set_limits(self, name: str, rate: int, least: int) -> None:
        self._completions.check()
        try:
            self._core.limit_peer(name, rate, least)
        except NativeError as error:
            raise translate(error, peer=name) from None

    @property
    def limits(self) -> Mapping[str, PeerLimit]:
        """Limits by peer name; read-only."""
        self._completions.check()
        try:
            found = self._core.peer_limits()
        except NativeError as error:
            raise translate(error) from None
        return MappingProxyType({name: PeerLimit(rate or None, least) for name, rate, least in found})

    def switch_rails(self, transport: str, *, on: bool) -> None:
        """Switches all rails of one transport off or on, in all present and future sessions.

        Off: rails that are up go down, their pieces in progress move to other rails, and no new rail comes
        up. This agent does not dial them, and refuses them when peers dial. `Peer.notes` says so. On: this
        agent dials its own rails at once; a peer dials its own again within 30 s.

        Parameters
        ----------
        transport
            The transport's name as in `Peer.rails` and the options, e.g. ``"tcp"``.
        on
            False switches off. Nothing happens if the rails are in that state already.

        Raises
        ------
        UsageError
            ``unsupported``: a session would end, because it has no other rail or because ``require`` names
            the transport. Nothing was switched, and the message names the peers. ``invalid-argument``: the
            agent has no such transport.
        """
        check_kind(transport, "transport", str, "a transport's name, as in peer.rails")
        is_on = flag(on, "on")
        self._completions.check()
        try:
            self._core.switch_rails(transport, is_on)
        except NativeError as error:
            raise translate(error, rail=transport) from None

    def reload_certificates(self) -> None:
        """Reads the files of `AgentOptions.tls` again, for connections that begin from now on.

        Open sessions and their transfers go on. A certificate that was revoked meanwhile cannot open a new
        session.

        Raises
        ------
        UsageError
            ``invalid-argument``: the agent has no certificates, or a file cannot be used. The certificates
            that were read before stay in use.
        """
        if self._tls is None:
            raise invalid("this agent was made without certificates: give AgentOptions(tls=kvxfer.Tls(...))")
        self._completions.check()
        try:
            self._core.renew_certificates(self._tls)
        except NativeError as error:
            raise translate(error) from None

    @property
    def rails_off(self) -> tuple[str, ...]:
        """Transports whose rails are switched off (`switch_rails`)."""
        self._completions.check()
        try:
            return tuple(self._core.rails_off())
        except NativeError as error:
            raise translate(error) from None

    def set_secret(self, secret: bytes | str | tuple[bytes | str, ...]) -> None:
        """Replaces the secret for sessions that begin from now on; open sessions go on.

        To change a cluster's secret without losing a session, give every agent ``(new, old)``, one after the
        other. When all have it, give every agent ``new``. While some agents run an older release and know
        only the old secret, use ``(old, new)`` until they have the new one.

        Parameters
        ----------
        secret
            At least 16 bytes, or a tuple of two secrets: both are accepted, and the first is preferred.

        Raises
        ------
        UsageError
            ``invalid-argument``: a secret is too short, there are more than two, or the agent was made with
            certificates or without a secret (it then uses its user's own). Nothing has changed.

        Notes
        -----
        If the agent's secret came from a file, the next change of the file replaces this secret. `options`
        still shows the values with which the agent was made.
        """
        accepted = given_secrets(secret)
        self._completions.check()
        try:
            self._core.set_secrets(accepted[0], accepted[1] if len(accepted) > 1 else b"")
        except NativeError as error:
            raise translate(error) from None

    def reload_secret(self) -> None:
        """Reads the secret's file again, for sessions that begin from now on; open sessions go on.

        An agent whose secret came from a file reads the file again by itself when it changes. Call this if
        the system does not report changes of that folder (a network file system), or after `set_secret`.

        Raises
        ------
        UsageError
            ``invalid-argument``: the file cannot be read or does not hold one or two secrets, or the agent's
            secret did not come from a file. Nothing has changed.
        """
        self._completions.check()
        try:
            self._core.reload_secrets()
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


def _name_of(peer: Peer | str) -> str:
    check_kind(peer, "peer", Peer | str, "a Peer, or a peer's name")
    name = peer if isinstance(peer, str) else peer.name
    check_name(name, "peer")
    return name
