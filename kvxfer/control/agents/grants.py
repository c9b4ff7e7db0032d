"""Leases of agents' regions that REST grants and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvxfer.control import schema
from kvxfer.control.agents.agent_errors import CallRefused
from kvxfer.control.agents.agent_view import AgentView, lease_id
from kvxfer.control.agents.attached import Attached
from kvxfer.control.agents.drains import Drains
from kvxfer.control.schema.problems import Refusal

# An agent that revokes may have to wait for a device that is still copying.
_REVOKE_TIMEOUT_S: Final = 30.0
# Digits of an agent's id at the start of a lease's id.
_DIGITS: Final = 32


class Grants:
    """Grants, extends, revokes and lists leases."""

    def __init__(
        self, agents: AgentView, drains: Drains, note: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._agents = agents
        self._drains = drains
        self._note = note

    def shown(self, agent: str | None) -> list[schema.Lease]:
        """Returns leases of all agents, or of one."""
        return [lease for each in self._agents.some(agent) for lease in self._agents.leases(each)]

    async def grant(self, asked: schema.LeaseRequest) -> schema.LeaseGranted:
        """Has an agent grant a lease."""
        self._drains.require_open()
        agent = self._agents.find(asked.agent)
        args = asked.model_dump(exclude={"agent"})
        if isinstance(asked.holder, int):
            args |= {"holder": None, "session": asked.holder}
        try:
            told = await self._agents.call(agent, "grant.grant", args)
        except CallRefused as refused:
            if refused.code == "peer-lost":  # the named holder is gone; it was not asked for anything
                raise Refusal("conflict", refused.words) from None
            raise
        id_ = lease_id(agent.incarnation, str(told["lease"]))
        self._note("leases.created", {"id": id_, "agent": agent.incarnation, "name": agent.name})
        return schema.LeaseGranted(id=id_, token=told["token"])

    async def extend(self, id_: str, ttl_s: float) -> schema.LeaseEnded:
        """Makes a lease last longer."""
        agent, lease = self._find(id_)
        told = await self._agents.call(agent, "grant.extend", {"lease": lease, "ttl_s": ttl_s})
        if not told.get("found"):
            raise _none(id_)
        return schema.LeaseEnded(id=id_, state="active")

    async def revoke(self, id_: str) -> schema.LeaseEnded:
        """Ends a lease; returns when its fence is complete."""
        agent, lease = self._find(id_)
        told = await self._agents.call(agent, "grant.revoke", {"lease": lease}, _REVOKE_TIMEOUT_S)
        if not told.get("found"):
            raise _none(id_)
        self._note("leases.revoked", {"id": id_, "agent": agent.incarnation, "name": agent.name})
        return schema.LeaseEnded(id=id_, state="revoked")

    def _find(self, id_: str) -> tuple[Attached, str]:
        agent = self._agents.attached.get(id_[:_DIGITS])
        if agent is None or id_[_DIGITS : _DIGITS + 1] != "-":
            raise _none(id_)
        return agent, id_[_DIGITS + 1 :]


def _none(id_: str) -> Refusal:
    return Refusal("not-found", f"there is no lease {id_!r} (any more)")
