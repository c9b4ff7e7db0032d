"""Agents from which pages are parked, and into which pages are pushed; attached ones grant leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from kvxfer.control.own.own_agent import OwnAgent, RemoteRegion
from kvxfer.errors import UsageError, invalid
from kvxfer.lease_token import LeaseToken
from kvxfer.log import logger
from kvxfer.region_descriptor import RegionDescriptor

# A lease on blocks to be parked lasts this much longer than the read. It is revoked after the read.
_GRANT_MARGIN_S: Final = 10.0
_GRANT_TIMEOUT_S: Final = 10.0


class AttachedAgent(Protocol):
    """What the pool needs to know of an agent that is attached to the daemon."""

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def address(self) -> str: ...


class Granter(Protocol):
    """Agents that can be asked for leases: `kvxfer.control.agents.agent_links.AgentLinks`."""

    @property
    def agents(self) -> Mapping[str, Any]:
        """Attached agents (`AttachedAgent`), by incarnation."""
        ...

    async def call(
        self, incarnation: str, verb: str, args: Mapping[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Asks an agent to do something."""
        ...


class PageSource(NamedTuple):
    """A region of another agent; `incarnation` is ``""`` if that agent is not attached."""

    region: RegionDescriptor
    incarnation: str


class BorrowedLease(NamedTuple):
    """A lease that an attached agent has granted at the pool's request."""

    incarnation: str
    number: Any
    token: LeaseToken


class PageSources:
    """Finds source and target regions, and asks for leases."""

    def __init__(self, own: OwnAgent, granter: Granter | None) -> None:
        self._own = own
        self._granter = granter

    async def find(self, place: RemoteRegion) -> PageSource:
        """Returns a region; connects to its agent first if there is no session.

        Raises
        ------
        UsageError
            ``unsupported``: it is the pool's own agent. As for `OwnAgent.remote_region`.
        KvxferError
            As for connecting.
        """
        if place.agent in (self._own.name, self._own.incarnation):
            raise UsageError(
                f"{self._own.name} owns the pool: pages are parked from, and pushed to, other agents",
                code="unsupported",
            )
        attached = self._attached(place.agent)
        if attached is None:
            return PageSource(await self._own.remote_region(place), "")
        place = place._replace(agent=attached.incarnation, address=attached.address)
        return PageSource(await self._own.remote_region(place, is_known=True), attached.incarnation)

    async def borrow(
        self, source: PageSource, blocks: Sequence[int], timeout_s: float
    ) -> BorrowedLease | None:
        """Asks an attached agent for a lease to read; None for any other agent.

        Raises
        ------
        TimeoutError
            It does not answer in `timeout_s`, or in ten seconds.
        """
        if self._granter is None or not source.incarnation:
            return None
        args = {
            "region": source.region.name,
            "holder": self._own.name,
            "blocks": list(blocks),
            "mode": "read",
            "ttl_s": timeout_s + _GRANT_MARGIN_S,
        }
        within_s = min(timeout_s, _GRANT_TIMEOUT_S)
        answer = await self._granter.call(source.incarnation, "grant.grant", args, within_s)
        return BorrowedLease(source.incarnation, answer["lease"], LeaseToken.parse(answer["token"]))

    async def give_back(self, borrowed: BorrowedLease) -> None:
        """Revokes a lease; if that fails, the lease ends when its time is over."""
        assert self._granter is not None
        try:
            args = {"lease": borrowed.number}
            await self._granter.call(borrowed.incarnation, "grant.revoke", args, _GRANT_TIMEOUT_S)
        except Exception as error:
            logger().info(
                "kvxfer: a lease of agent %s could not be revoked, and will expire: %r",
                borrowed.incarnation,
                error,
            )

    def _attached(self, agent: str) -> AttachedAgent | None:
        if self._granter is None or not agent:
            return None
        if (found := self._granter.agents.get(agent)) is not None:
            first: AttachedAgent = found
            return first
        named = [each for each in self._granter.agents.values() if each.name == agent]
        if len(named) > 1:
            raise invalid(f"{len(named)} agents named {agent!r} are attached: name one by its incarnation")
        return named[0] if named else None
