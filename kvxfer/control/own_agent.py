"""The daemon's own agent: it reads and writes for those who have none, and grants what is its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from kvxfer.address import Address
from kvxfer.agent import Agent
from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.arguments import seconds
from kvxfer.directory.entry import Entry
from kvxfer.directory.protocol import Directory
from kvxfer.errors import ExhaustedError, PeerError, UsageError, invalid
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.lease import Lease, LeaseMode
from kvxfer.lease_token import LeaseToken
from kvxfer.log import logger
from kvxfer.options import AgentOptions
from kvxfer.peer import Peer, PeerState
from kvxfer.region import Blocks, Region, RegionDescriptor
from kvxfer.transfer import Transfer

# Addresses come from requests, and one that does not answer takes a descriptor for as long as connecting may.
_MOST_DIALS: Final = 64
_MOST_DIALS_OF_HOST: Final = 16
#: Leases that are open at a time, and the longest that one may last.
MOST_LEASES: Final = 4096
MAX_TTL_S: Final = 24 * 3600.0
# A region that its agent has registered just now is told a moment later.
_REGION_TIMEOUT_S: Final = 1.0
# Of a node's name, so that regions have room for theirs (128 bytes).
_MAX_NODE_NBYTES: Final = 48


class RemotePlace(NamedTuple):
    """A region of another agent, as a request names it.

    Attributes
    ----------
    agent
        Its name, or its incarnation in hexadecimal digits; ``""`` for whoever is at `address`.
    region
        As it was registered.
    address
        ``"tcp://host:port"``, where it is dialled if there is no session yet; ``""`` of one that has one, or
        is found in the directory.
    """

    agent: str
    region: str
    address: str = ""


@dataclass(slots=True, eq=False)
class OwnLease:
    """A right to blocks of a region of the daemon's own agent, which can be made longer.

    Attributes
    ----------
    number
        By which it is named here; never reused.
    region
        The region's name.
    lease
        What was granted. It lasts until it is revoked, which `OwnAgent` does when its time is over.
    expires_at
        By the event loop's clock (CLOCK_MONOTONIC).
    end
        How it ended: ``"revoked"``, ``"expired"``, ``"peer-lost"``, ``"region-gone"``, ``"closed"``; ``""``
        of one that has not.
    """

    number: int
    region: str
    lease: Lease
    expires_at: float
    end: str = ""
    _timer: asyncio.TimerHandle | None = None
    _watcher: asyncio.Task[None] | None = None

    @property
    def token(self) -> LeaseToken:
        """What the reader passes as ``lease=``."""
        return self.lease.token


class OwnAgent:
    """One agent of the daemon's, named ``daemon/<node>``, and behind it its role where it has one.

    No agent connects to itself. So that pages of memory that was handed over can be parked in the same
    daemon's pool, that memory is another agent's: one with a role.

    Its regions are slabs of the page pool and memory that processes have handed over; their names end with
    the node's (`region_name`), since two agents compare regions that they call by one name. All methods
    belong to one event loop.

    Parameters
    ----------
    node
        The node's name, unique among daemons that meet; at most 48 bytes.
    role
        ``"memory"``, say; "" of the agent that has the pool. Text of ASCII letters.
    options
        As of any agent. The daemon may have it attach to itself as others do.
    allow
        Hosts that requests may name. Agents that are found in the directory are dialled all the same.
    directory, metadata
        As of any agent.

    Raises
    ------
    KvxferError
        As making an `Agent` does. ``invalid-argument``: `node` is no name.
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
        if not 0 < len(node.encode()) <= _MAX_NODE_NBYTES or not node.isprintable():
            raise invalid(f"a node's name has 1 to {_MAX_NODE_NBYTES} bytes, not {node!r:.100}")
        self.node = node
        self.allow = allow or AllowedHosts()
        name = f"daemon/{node}/{role}" if role else f"daemon/{node}"
        self.agent = Agent(name, options, directory=directory, metadata=metadata)
        self._directory = directory
        #: Leases that have not ended, by number. Read only.
        self.leases: dict[int, OwnLease] = {}
        self._last_lease = 0
        #: Called when a lease has run out, which the agent itself takes for revoked. Must not block.
        self.on_expired: Callable[[], None] | None = None
        self._dials: dict[str, asyncio.Task[Peer]] = {}
        self._dials_of_host: dict[str, int] = {}
        self._at_address: dict[str, Peer] = {}

    async def aclose(self) -> None:
        """Ends its transfers, leases and sessions, and fences its regions. Idempotent."""
        for dial in list(self._dials.values()):
            dial.cancel()
        for lease in list(self.leases.values()):
            if lease._timer is not None:
                lease._timer.cancel()
        await self.agent.aclose()
        watchers = [lease._watcher for lease in self.leases.values() if lease._watcher is not None]
        if watchers:
            await asyncio.wait(watchers)

    @property
    def name(self) -> str:
        """What peers call it."""
        return self.agent.name

    @property
    def address(self) -> str:
        """Where peers reach it."""
        return self.agent.address

    @property
    def incarnation(self) -> str:
        """In hexadecimal digits."""
        return self.agent.incarnation.hex()

    def sibling(self, role: str, *, gpu: int | None = None) -> OwnAgent:
        """Returns another agent of this daemon's, with the same options, a role, a GPU; close it yourself.

        Where this one listens on a port that was named, that listens on the next, and says so to peers.

        Raises
        ------
        KvxferError
            As making an agent does.
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
        """Returns what a region of this node is called, e.g. ``"pool/7@node-3"``."""
        return f"{kind}/{name}@{self.node}"

    def register(self, name: str, memory: Any, layout: KVLayout) -> Region:
        """Makes memory known to peers, as `Agent.register`."""
        return self.agent.register(name, memory, layout)

    def region(self, name: str) -> Region:
        """Returns one of its regions.

        Raises
        ------
        UsageError
            ``unknown-region``: there is none of this name.
        """
        found = self.agent.regions.get(name)
        if found is None:
            raise UsageError(f"{self.name} has no region {name!r}", code="unknown-region")
        return found

    async def remote_region(self, place: RemotePlace, *, is_known: bool = False) -> RegionDescriptor:
        """Returns a region of another agent, connecting to that first where it has to.

        Parameters
        ----------
        place
            As a request names it.
        is_known
            Whether the address comes from somebody who may name any, e.g. from an agent that is attached.

        Raises
        ------
        UsageError
            ``not-permitted``: the address is not allowed. ``unknown-region``: the agent has no such region.
        KvxferError
            As connecting does.
        """
        peer = await self.connect(place.agent, place.address, is_known=is_known)
        try:
            return await peer.region(place.region, _REGION_TIMEOUT_S)
        except TimeoutError as error:
            raise UsageError(str(error), code="unknown-region", peer=peer.name) from None

    # ---- peers ------------------------------------------------------------------------------

    def peer(self, agent: str) -> Peer | None:
        """Returns the newest session with an agent, named as in `RemotePlace`; None where there is none."""
        for peer in reversed(self.agent.peers):
            if agent in (peer.name, peer.incarnation.hex()):
                return peer
        return None

    async def connect(self, agent: str, address: str = "", *, is_known: bool = False) -> Peer:
        """Returns a session with an agent: one that is open, or a new one.

        Raises
        ------
        UsageError
            ``not-permitted``: the address is not allowed. ``invalid-argument``: it is none, or neither an
            address nor a directory says where the agent is.
        PeerError
            As `Agent.connect`; ``unreachable`` also where too many others are being dialled, and
            ``peer-restarted`` where another agent answers.
        """
        if agent and (peer := self.peer(agent)) is not None:
            return peer
        if not address:
            if not agent or self._directory is None:
                raise PeerError(
                    f"no session is open with agent {agent!r}, and no address of it is known: name one",
                    code="unreachable",
                    peer=agent,
                )
            return await self._dialled(agent, agent, "")
        place = Address.parse(address, "address")
        if not is_known and not self.allow.allow(place.host):
            raise UsageError(
                f"host {place.host} is not among those that may be dialled ({self.allow}): allow it where "
                "the daemon is started",
                code="not-permitted",
                peer=agent,
            )
        peer = await self._dialled(str(place), str(place), place.host.lower())
        if agent and agent not in (peer.name, peer.incarnation.hex()):
            raise PeerError(
                f"agent {peer.name!r} ({peer.incarnation.hex()}) answers at {address}, not {agent!r}",
                code="peer-restarted",
                peer=agent,
            )
        return peer

    async def connect_to(self, entry: Entry, *, is_known: bool = False) -> Peer:
        """Returns a session with one life of an agent, as `connect` does."""
        return await self.connect(entry.incarnation.hex(), entry.address, is_known=is_known)

    async def _dialled(self, key: str, target: str, host: str) -> Peer:
        """Returns the session of all who ask for one target; who is cancelled leaves it to the others."""
        known = self._at_address.get(key)
        if known is not None:
            if known.state is PeerState.OPEN:
                return known
            del self._at_address[key]
        dial = self._dials.get(key)
        if dial is None:
            if len(self._dials) >= _MOST_DIALS or self._dials_of_host.get(host, 0) >= _MOST_DIALS_OF_HOST:
                raise PeerError(
                    f"{target} is not dialled: too many others are, and do not answer; ask again later",
                    code="unreachable",
                )
            dial = asyncio.create_task(self.agent.connect(target), name=f"dial {target}")
            self._dials[key] = dial
            self._dials_of_host[host] = self._dials_of_host.get(host, 0) + 1
            dial.add_done_callback(lambda done: self._has_dialled(key, host, done))
        return await asyncio.shield(dial)

    def _has_dialled(self, key: str, host: str, dial: asyncio.Task[Peer]) -> None:
        del self._dials[key]
        self._dials_of_host[host] -= 1
        if not self._dials_of_host[host]:
            del self._dials_of_host[host]
        if not dial.cancelled() and dial.exception() is None:
            self._at_address = {
                at: peer for at, peer in self._at_address.items() if peer.state is PeerState.OPEN
            }
            self._at_address[key] = dial.result()

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
        """Gives a right to blocks of a region of its own, until its time is over or it is revoked.

        Parameters
        ----------
        region
            By name.
        holder
            A name, or None for anybody who has the token. To write it is an agent with which a session is
            open, by name or incarnation (`connect` opens one).
        blocks, mode
            As in `Region.grant`.
        ttl_s
            How long; no heartbeat renews it, `extend` does. At most a day.
        on_end
            Called when it has ended, and no byte moves under it any more.

        Raises
        ------
        UsageError
            As `Region.grant`; ``unknown-region``; ``invalid-argument`` also for a time that is too long.
        ExhaustedError
            4096 leases are open.
        PeerError
            ``unreachable``: no session is open with who is to write.
        """
        ttl_s = _ttl(ttl_s)
        if len(self.leases) >= MOST_LEASES:
            raise ExhaustedError(f"{MOST_LEASES} leases are open: revoke some", code="exhausted")
        whose: Peer | str | None = holder
        if mode == "write":
            whose = self.peer(holder) if holder else None
            if whose is None:
                raise PeerError(
                    f"no session is open with agent {holder!r}, which is to write: connect first, from "
                    "either side",
                    code="unreachable",
                    peer=holder or "",
                )
        lease = self.region(region).grant(whose, None if blocks is None else list(blocks), mode, math.inf)
        loop = asyncio.get_running_loop()
        self._last_lease += 1
        own = OwnLease(self._last_lease, region, lease, loop.time() + ttl_s)
        self.leases[own.number] = own
        own._timer = loop.call_at(own.expires_at, self._expire, own)
        own._watcher = asyncio.create_task(self._watch(own, on_end), name=f"lease {own.number}")
        return own

    def extend(self, number: int, ttl_s: float) -> OwnLease:
        """Begins a lease's time anew.

        Raises
        ------
        UsageError
            ``lease-ended``: it has ended, or never was.
        """
        ttl_s = _ttl(ttl_s)
        own = self._lease(number)
        assert own._timer is not None
        own._timer.cancel()
        own.expires_at = asyncio.get_running_loop().time() + ttl_s
        own._timer = asyncio.get_running_loop().call_at(own.expires_at, self._expire, own)
        return own

    async def revoke(self, number: int) -> None:
        """Ends a lease; when this returns no byte moves under it. Does nothing to one that has ended.

        Cancelling abandons the waiting alone.
        """
        own = self.leases.get(number)
        if own is None:
            return
        self._end(own, "revoked")
        assert own._watcher is not None
        await asyncio.wait([own._watcher])

    def _lease(self, number: int) -> OwnLease:
        own = self.leases.get(number)
        if own is None or own.end:
            raise UsageError(f"lease {number} has ended, or never was: grant another", code="lease-ended")
        return own

    def _expire(self, own: OwnLease) -> None:
        if not own.end and self.on_expired is not None:
            self.on_expired()
        self._end(own, "expired")

    def _end(self, own: OwnLease, how: str) -> None:
        """Ends the right; its watcher waits for the fence."""
        if not own.end:
            own.end = how
        if own._timer is not None:
            own._timer.cancel()
        if not self.agent.closed:
            # Ends the right at once; what it returns would wait for the fence, which the watcher does.
            own.lease.revoke().close()

    async def _watch(self, own: OwnLease, on_end: Callable[[OwnLease], None] | None) -> None:
        """Takes a lease out of the table when it has ended, however that came."""
        try:
            state = await own.lease.ended()
            own.end = own.end or str(state)
        except Exception as error:
            if not self.agent.closed:
                logger().error("kvxfer: lease %d: %r", own.number, error)
            own.end = own.end or "closed"
        finally:
            if own._timer is not None:
                own._timer.cancel()
            self.leases.pop(own.number, None)
            if on_end is not None:
                on_end(own)


def _next_port(address: str) -> str:
    if not address:
        return ""
    place = Address.parse(address, "address", port_needed=False)
    return str(place._replace(port=place.port + 1)) if place.port else address


def _ttl(ttl_s: float) -> float:
    ttl_s = seconds(ttl_s, "ttl_s")
    if not 0 < ttl_s <= MAX_TTL_S:
        raise invalid(f"ttl_s is {ttl_s}, and a lease lasts at most {MAX_TTL_S:g} s")
    return ttl_s
