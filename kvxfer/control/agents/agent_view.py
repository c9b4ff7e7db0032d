"""Agents as /v1 shows them: the attached agents, including the daemon's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.control import schema
from kvxfer.control.agents.agent_links import AgentLinks
from kvxfer.control.agents.attached import Attached
from kvxfer.control.schema.problems import Refusal
from kvxfer.session.records import Record


class AgentView:
    """Finds agents by id or name, and calls them."""

    def __init__(self, links: AgentLinks) -> None:
        self._links = links

    @property
    def attached(self) -> Mapping[str, Attached]:
        """Attached agents, by id."""
        return self._links.agents

    def all(self) -> list[Attached]:
        """Returns all agents, in the order in which they attached."""
        return list(self._links.agents.values())

    def find(self, agent: str) -> Attached:
        """Returns an agent by its id, or by its name if no other agent has that name.

        Raises
        ------
        Refusal
            ``not-found``, or ``conflict`` if several agents have the name.
        """
        if (found := self._links.agents.get(agent)) is not None:
            return found
        named = [each for each in self._links.agents.values() if each.name == agent]
        if len(named) > 1:
            raise Refusal("conflict", f"{len(named)} agents are called {agent!r}: name one by its id")
        if not named:
            raise Refusal("not-found", f"no agent {agent!r} is attached")
        return named[0]

    def some(self, agent: str | None) -> list[Attached]:
        """Returns the agents that a filter names: all, one, or none."""
        if agent is None:
            return self.all()
        return [each for each in self.all() if agent in (each.incarnation, each.name)]

    async def call(
        self, agent: Attached, verb: str, args: Mapping[str, Any], timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Calls one agent: see `AgentLinks.call`."""
        return await self._links.call(agent.incarnation, verb, args, timeout_s)

    async def open_transfers(self, agent: Attached, most: int, timeout_s: float) -> list[Record]:
        """Returns what an agent has open: see `AgentLinks.open_transfers`."""
        return await self._links.open_transfers(agent.incarnation, most, timeout_s)

    def name_of(self, id_: str) -> str:
        """Returns an agent's name; ``""`` if the agent is gone."""
        agent = self._links.agents.get(id_)
        return "" if agent is None else agent.name

    def region_name(self, id_: str, region: int) -> str:
        """Returns a region's name; ``""`` if the region is gone."""
        agent = self.attached.get(id_)
        regions = () if agent is None else agent.regions
        return next((each["name"] for each in regions if each["id"] == region), "")

    def blocks_nbytes(self, agent: str, region: str, num_blocks: int) -> int:
        """Returns the bytes of a number of a region's blocks; 0 if not known."""
        for each in self.some(agent):
            for row in each.regions:
                if row["name"] == region and row["num_blocks"]:
                    return int(row["nbytes"]) // int(row["num_blocks"]) * num_blocks
        return 0

    # ---- as the schema has it ----------------------------------------------------------------------

    def shown(self) -> list[schema.Agent]:
        """Returns all agents."""
        return [schema.Agent.model_validate(_agent(each)) for each in self.all()]

    def detail(self, agent: Attached) -> schema.AgentDetail:
        """Returns one agent with all that it has reported of itself."""
        limits = {
            each["name"]: {
                "max_bytes_per_s": each["max_bytes_per_s"] or None,
                "least_priority": each["least_priority"],
            }
            for each in agent.limits
        }
        told = {**_agent(agent), "options": dict(agent.options), "stats": agent.stats}
        told |= {"rails_off": agent.rails_off, "limits": limits}
        return schema.AgentDetail.model_validate(told)

    def regions(self, agent: Attached) -> list[schema.Region]:
        """Returns an agent's regions."""
        return [
            schema.Region.model_validate(
                {
                    "agent": agent.incarnation,
                    "agent_name": agent.name,
                    "id": region["id"],
                    "name": region["name"],
                    "kind": region.get("kind", ""),
                    "num_blocks": region["num_blocks"],
                    "nbytes": region["nbytes"],
                    "layout": region.get("layout"),
                    "notes": region.get("notes", []),
                }
            )
            for region in agent.regions
        ]

    def peers(self, agent: Attached) -> list[schema.Peer]:
        """Returns an agent's sessions."""
        return [self.peer(agent, row) for row in agent.peers]

    def peer(self, agent: Attached, row: Mapping[str, Any]) -> schema.Peer:
        """Returns one session, as its agent reported it."""
        return schema.Peer.model_validate(
            {
                "agent": agent.incarnation,
                "agent_name": agent.name,
                "session": row["session"],
                "id": row["incarnation"],
                "name": row["name"],
                "address": row.get("address", ""),
                "rails": row.get("rails", []),
                "paths": row.get("paths", []),
                "notes": row.get("notes", []),
                "regions": list(row.get("regions", ())),
            }
        )

    def rails(self, agent: Attached) -> list[schema.Rail]:
        """Returns the rails of an agent's sessions, and the transports that it has switched off."""
        up = [
            schema.Rail(
                agent=agent.incarnation,
                agent_name=agent.name,
                peer=peer["incarnation"],
                peer_name=peer["name"],
                session=peer["session"],
                transport=transport,
            )
            for peer in agent.peers
            for transport in peer.get("rails", ())
        ]
        return up + [
            schema.Rail(
                agent=agent.incarnation,
                agent_name=agent.name,
                peer="",
                peer_name="",
                session=0,
                transport=transport,
                state="off",
            )
            for transport in agent.rails_off
        ]

    def leases(self, agent: Attached) -> list[schema.Lease]:
        """Returns the leases that an agent has granted."""
        return [
            schema.Lease.model_validate(
                {
                    "id": lease_id(agent.incarnation, str(lease["lease"])),
                    "agent": agent.incarnation,
                    "agent_name": agent.name,
                    "holder": lease.get("holder") or "",
                    "session": lease.get("peer"),
                    "region": lease["region"],
                    "region_name": self.region_name(agent.incarnation, lease["region"]),
                    "mode": lease["mode"],
                    "num_blocks": lease.get("num_blocks"),
                    "state": lease["state"],
                    "seconds_left": lease.get("seconds_left"),
                }
            )
            for lease in agent.leases
        ]


def _agent(agent: Attached) -> dict[str, Any]:
    return {
        "id": agent.incarnation,
        "name": agent.name,
        "address": agent.address,
        "pid": agent.pid,
        "uid": agent.uid,
        "host": agent.host,
        "version": agent.version,
        "may": list(agent.may),
        "draining": agent.draining,
        "attached_at_s": agent.attached_at,
        "regions": max(agent.num_regions, len(agent.regions)),
        "peers": max(agent.num_peers, len(agent.peers)),
        "leases": max(agent.num_leases, len(agent.leases)),
        "records_dropped": agent.records_dropped,
    }


def lease_id(agent: str, lease: str) -> str:
    """Returns a lease's id in /v1, made from the agent's id of it; it gives no access to blocks."""
    return f"{agent}-{lease}"
