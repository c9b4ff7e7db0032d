"""The daemon's own agent: reads and writes for clients without an agent, and grants leases on its regions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from kvxfer.address import Address
from kvxfer.agent import Agent
from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.control.own.own_dials import OwnDials
from kvxfer.control.own.own_leases import OwnLease, OwnLeases
from kvxfer.directory.entry import Entry
from kvxfer.directory.protocol import Directory
from kvxfer.errors import KvxferError, PeerError, UsageError, invalid
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.lease import LeaseMode
from kvxfer.lease_token import LeaseToken
from kvxfer.naming import is_text
from kvxfer.options import AgentOptions
from kvxfer.peer import Peer, session_with
from kvxfer.region import Blocks, Region
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.transfer import Transfer

# An agent reports a new region a moment after it has registered it.
_REGION_TIMEOUT_S: Final = 1.0
# Of a node's name, so that names of regions have room (128 bytes).
_MAX_NODE_NBYTES: Final = 48


class RemoteRegion(NamedTuple):
    """A region of another agent, as a request names it.

    Attributes
    ----------
    agent
        Its name, or its incarnation in hexadecimal digits; ``""`` for any agent at `address`.
    region
        The name with which it was registered.
    address
        ``"tcp://host:port"``, which is dialled if there is no session yet; ``""`` if there is a session, or
        the directory has the agent.
    """

    agent: str
    region: str
    address: str = ""


class OwnAgent:
    """An agent of the daemon, named ``daemon/<node>``, followed by its role if it has one.

    An agent cannot connect to itself. Yet the daemon's pool has to park pages of memory that was handed over
    to the same daemon. So that memory belongs to a second agent, which has a role.

    Its regions are the page pool, once for each layout, and memory that was handed over. The names of regions
    end with the node's name (`region_name`), because two agents compare regions that have the same name. All
    methods belong to one event loop.

    Parameters
    ----------
    node
        The node's name, unique among daemons that meet; at most 48 bytes.
    role
        E.g. ``"memory"``; "" for the agent that has the pool. ASCII letters.
    options
        As for any agent. With the daemon's socket in them, it attaches to its own daemon like others.
    allow
        Hosts that may be dialled for requests, by the address that is dialled: also for agents that the
        directory has, because whoever publishes there names any address.
    directory, metadata
        As for any agent.

    Raises
    ------
    KvxferError
        As for making an `Agent`. ``invalid-argument``: `node` cannot be a name.
    """

    def __init__(
        self,
        node: str,
        options: AgentOptions | None = None,
        *,
        allow: AllowedHosts | None = None,
        role: str = "",
        directory: Directory | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if not is_text(node) or not 0 < len(node.encode()) <= _MAX_NODE_NBYTES or not node.isprintable():
            raise invalid(f"a node's name must have 1 to {_MAX_NODE_NBYTES} bytes, not {node!r:.100}")
        self.node = node
        self.allow = allow or AllowedHosts()
        name = f"daemon/{node}/{role}" if role else f"daemon/{node}"
        self.agent = Agent(name, options, directory=directory, metadata=metadata)
        self._directory = directory
        #: Leases that have not ended.
        self.leases = OwnLeases(self.agent)
        self._dials = OwnDials(self.agent)

    async def aclose(self) -> None:
        """Ends its transfers, leases and sessions, and fences its regions. Idempotent."""
        self._dials.cancel()
        self.leases.stop_clocks()
        await self.agent.aclose()
        await self.leases.ended()

    @property
    def name(self) -> str:
        """The name that peers see."""
        return self.agent.name

    @property
    def address(self) -> str:
        """The address at which peers reach it."""
        return self.agent.address

    @property
    def incarnation(self) -> str:
        """In hexadecimal digits."""
        return self.agent.incarnation.hex()

    def sibling(self, role: str, *, gpu: int | None = None) -> OwnAgent:
        """Returns another agent of this daemon, with the same options, a role, a GPU; the caller closes it.

        If this agent listens on a fixed port, the sibling listens on the next port and advertises that one.

        Raises
        ------
        KvxferError
            As for making an agent.
        """
        options = self.agent.options
        return OwnAgent(
            self.node,
            replace(
                options,
                listen=_next_port(options.listen),
                advertise=None if options.advertise is None else _next_port(options.advertise),
                gpu=gpu,
            ),
            role=role,
            allow=self.allow,
            directory=self._directory,
            metadata=self.agent.entry.metadata,
        )

    # ---- regions ----------------------------------------------------------------------------

    def region_name(self, kind: str, name: str) -> str:
        """Returns the name of a region of this node, e.g. ``"pool/7@node-3"``."""
        return f"{kind}/{name}@{self.node}"

    def register(self, name: str, memory: Any, layout: KVLayout) -> Region:
        """Registers memory, as `Agent.register`."""
        return self.agent.register(name, memory, layout)

    def region(self, name: str) -> Region:
        """Returns one of its regions.

        Raises
        ------
        UsageError
            ``unknown-region``: there is no region of this name.
        """
        found = self.agent.regions.get(name)
        if found is None:
            raise UsageError(f"{self.name} has no region {name!r}", code="unknown-region")
        return found

    async def remote_region(self, place: RemoteRegion, *, is_known: bool = False) -> RegionDescriptor:
        """Returns a region of another agent; connects to that agent first if needed.

        Parameters
        ----------
        place
            The region, as a request names it.
        is_known
            Whether the address comes from a trusted side that may name any address, e.g. from an attached
            agent.

        Raises
        ------
        UsageError
            ``not-permitted``: the address is not permitted. ``unknown-region``: the agent has no such region.
        KvxferError
            As for connecting.
        """
        peer = await self.connect(place.agent, place.address, is_known=is_known)
        try:
            return await peer.region(place.region, _REGION_TIMEOUT_S)
        except TimeoutError as error:
            raise UsageError(str(error), code="unknown-region", peer=peer.name) from None

    # ---- peers ------------------------------------------------------------------------------

    def peer(self, agent: str) -> Peer | None:
        """Returns the session with an agent, named as in `RemoteRegion`; None if there is none."""
        return session_with(self.agent.peers, agent)

    async def connect(self, agent: str, address: str = "", *, is_known: bool = False) -> Peer:
        """Returns a session with an agent: one that is open, or a new one.

        Raises
        ------
        UsageError
            ``not-permitted``: the address is not permitted. ``invalid-argument``: it is malformed, or neither
            an address nor a directory gives the agent's place.
        PeerError
            As for `Agent.connect`. Also ``unreachable`` if too many other agents are being dialled, and
            ``peer-restarted`` if another agent answers.
        """
        if agent and (peer := self.peer(agent)) is not None:
            return peer
        if not address:
            if not agent or self._directory is None:
                raise invalid(
                    f"no session is open with agent {agent!r}, and its address is unknown: name an "
                    "agent that `kvxfer agents` lists, or an address"
                )
            return await self._connect_to_entry(self._directory, agent)
        if not is_known:
            address = await self._permitted(address, agent)
        place = Address.parse(address, "address")
        peer = await self._dials.dial(str(place), str(place), place.host.lower())
        if agent and agent not in (peer.name, peer.incarnation.hex()):
            raise PeerError(
                f"agent {peer.name!r} ({peer.incarnation.hex()}) answered at {address}, not {agent!r}",
                code="peer-restarted",
                peer=agent,
            )
        return peer

    async def _connect_to_entry(self, directory: Directory, agent: str) -> Peer:
        """Returns a session with the agent that has a name in the directory."""
        entry = await directory.resolve(agent, self.agent.options.connect_timeout_s)
        if not entry.address:
            raise PeerError(f"{agent} does not accept peers", code="unreachable", peer=agent)
        place = Address.parse(await self._permitted(entry.address, agent), "address")
        target = replace(entry, address=str(place))
        return await self._dials.dial(entry.incarnation.hex(), target, place.host.lower())

    async def _permitted(self, address: str, agent: str) -> str:
        """Returns the address to dial for an address of another agent, which no trusted side has named."""
        try:
            return await asyncio.to_thread(self.allow.place_of, address)
        except KvxferError as error:
            error.peer = agent
            raise

    async def connect_to(self, entry: Entry, *, is_known: bool = False) -> Peer:
        """Returns a session with one life of an agent, as `connect` does."""
        return await self.connect(entry.incarnation.hex(), entry.address, is_known=is_known)

    # ---- transfers --------------------------------------------------------------------------

    def read(
        self,
        region: str,
        remote: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        lease: LeaseToken | None = None,
        **more: Any,
    ) -> Transfer:
        """Posts a copy of a peer's blocks into a region of its own, as `Agent.read`."""
        return self.agent.read(self.region(region), remote, src_blocks, dst_blocks, lease=lease, **more)

    def write(
        self,
        region: str,
        remote: RegionDescriptor,
        src_blocks: Blocks,
        dst_blocks: Blocks,
        *,
        lease: LeaseToken | None = None,
        **more: Any,
    ) -> Transfer:
        """Posts a copy of blocks of its own into a peer's region, as `Agent.write`."""
        return self.agent.write(self.region(region), remote, src_blocks, dst_blocks, lease=lease, **more)

    # ---- leases -----------------------------------------------------------------------------

    def grant(
        self,
        region: str,
        holder: str | None,
        blocks: Iterable[int] | None = None,
        mode: LeaseMode = "read",
        ttl_s: float = 30.0,
        *,
        on_end: Callable[[OwnLease], None] | None = None,
    ) -> OwnLease:
        """Grants a right to blocks of a region of its own, until its time is over or it is revoked.

        Parameters
        ----------
        region
            The region's name.
        holder
            A name, or None for any agent that has the token. A write lease needs an agent with an open
            session, by name or incarnation (`connect` opens one).
        blocks, mode
            As in `Region.grant`.
        ttl_s
            How long it lasts; heartbeats do not renew it, `extend` does. At most a day.
        on_end
            Called when the lease has ended, and no byte moves under it any more.

        Raises
        ------
        UsageError
            As for `Region.grant`; ``unknown-region``; ``invalid-argument`` also for a time that is too long.
        ExhaustedError
            4096 leases are open.
        PeerError
            ``unreachable``: there is no open session with the writer.
        """
        ttl_s = self.leases.require_room(ttl_s)
        whose: Peer | str | None = holder
        if mode == "write":
            whose = self.peer(holder) if holder else None
            if whose is None:
                raise PeerError(
                    f"no session is open with agent {holder!r}, the writer: connect first, from either side",
                    code="unreachable",
                    peer=holder or "",
                )
        lease = self.region(region).grant(whose, None if blocks is None else list(blocks), mode, math.inf)
        return self.leases.keep(region, lease, ttl_s, on_end)

    def extend(self, number: int, ttl_s: float) -> OwnLease:
        """Begins a lease's time anew: see `OwnLeases.extend`."""
        return self.leases.extend(number, ttl_s)

    async def revoke(self, number: int) -> None:
        """Ends a lease, with its fence: see `OwnLeases.revoke`."""
        await self.leases.revoke(number)


def _next_port(address: str) -> str:
    if not address:
        return ""
    place = Address.parse(address, "address", port_needed=False)
    return str(place._replace(port=place.port + 1)) if place.port else address
