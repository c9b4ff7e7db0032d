"""Leases of agents' regions, granted and ended for REST."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from kvxfer.control import schema
from kvxfer.control.agent_view import AgentView, lease_id
from kvxfer.control.attachments import Attached
from kvxfer.control.drains import Drains
from kvxfer.control.problems import Refusal

# Granted here, and perhaps not told by their agents yet.
_MOST_GRANTED: Final = 4096
# A device that copies is waited for by an agent that revokes.
_REVOKE_TIMEOUT_S: Final = 30.0


class Grants:
    """Grants, extends, revokes and lists leases."""

    def __init__(
        self, agents: AgentView, drains: Drains, note: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._agents = agents
        self._drains = drains
        self._note = note
        self._granted: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def shown(self, agent: str | None) -> list[schema.Lease]:
        """Returns leases of all agents, or of one."""
        return [lease for each in self._agents.some(agent) for lease in self._agents.leases(each)]

    async def grant(self, asked: schema.LeaseRequest) -> schema.LeaseGranted:
        """Has an agent grant one."""
        self._drains.require_open()
        agent = self._agents.find(asked.agent)
        told = await self._agents.call(agent, "grant.grant", asked.model_dump(exclude={"agent"}))
        id_ = lease_id(agent.incarnation, told["lease"])
        self._granted[id_] = (agent.incarnation, told["lease"])
        if len(self._granted) > _MOST_GRANTED:
            self._granted.popitem(last=False)
        self._note("leases.created", {"id": id_, "agent": agent.incarnation, "name": agent.name})
        return schema.LeaseGranted(id=id_, token=told["token"])

    async def extend(self, id_: str, ttl_s: float) -> schema.LeaseEnded:
        """Has it last longer."""
        agent, number = self._find(id_)
        await self._agents.call(agent, "grant.extend", {"lease": number, "ttl_s": ttl_s})
        return schema.LeaseEnded(id=id_, state="active")

    async def revoke(self, id_: str) -> schema.LeaseEnded:
        """Ends it; returns when its fence is complete."""
        agent, number = self._find(id_)
        told = await self._agents.call(agent, "grant.revoke", {"lease": number}, _REVOKE_TIMEOUT_S)
        self._granted.pop(id_, None)
        self._note("leases.revoked", {"id": id_, "agent": agent.incarnation, "name": agent.name})
        return schema.LeaseEnded(id=id_, state=str(told.get("state", "revoked")))

    def _find(self, id_: str) -> tuple[Attached, int]:
        if (known := self._granted.get(id_)) is not None:
            return self._agents.find(known[0]), known[1]
        for agent in self._agents.all():
            if id_.startswith(f"{agent.incarnation}-"):
                for lease in agent.leases:
                    if lease_id(agent.incarnation, lease["lease"]) == id_:
                        return agent, lease["lease"]
        raise Refusal("not-found", f"there is no lease {id_!r} (any more)")
