"""Agents, regions, peers and rails."""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import Path, Query, Request

from kvxfer.control import schema
from kvxfer.control.app.api import Api
from kvxfer.control.daemon.node import NodeDaemon

Item = TypeVar("Item")
AgentId = Annotated[
    str,
    Path(
        min_length=1,
        max_length=128,
        description="The agent's id, or its name if only one agent has it; the name may have slashes",
    ),
]
Cursor = Annotated[str, Query(max_length=512, description="`next` of the previous page")]
Limit = Annotated[int, Query(ge=1, le=250)]
AgentFilter = Annotated[str | None, Query(max_length=128, description="Id or name")]


def paged(items: list[Item], cursor: str, limit: int) -> schema.Listed[Item]:
    """Returns one page of a list that is short enough to build whole; the cursor is a number of items."""
    begin = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) < 10 else 0
    end = begin + limit
    return schema.Listed[Item].model_construct(
        items=items[begin:end], next=str(end) if end < len(items) else None
    )


def add_agents(api: Api, daemon: NodeDaemon) -> None:
    """Adds them."""
    agents = daemon.agents

    @api.get("/v1/agents", "read", tags=["agents"])
    async def list_agents(cursor: Cursor = "", limit: Limit = 100) -> schema.Listed[schema.Agent]:
        """Attached agents, including the daemon's own."""
        return paged(agents.shown(), cursor, limit)

    @api.get("/v1/agents/{agent:path}/regions", "read", tags=["agents"])
    async def list_agent_regions(
        agent: AgentId, cursor: Cursor = "", limit: Limit = 100
    ) -> schema.Listed[schema.Region]:
        """Regions of one agent, with their layouts."""
        return paged(agents.regions(agents.find(agent)), cursor, limit)

    @api.get("/v1/agents/{agent:path}/peers", "read", tags=["agents"])
    async def list_agent_peers(
        agent: AgentId, cursor: Cursor = "", limit: Limit = 100
    ) -> schema.Listed[schema.Peer]:
        """Sessions of one agent, with their rails."""
        return paged(agents.peers(agents.find(agent)), cursor, limit)

    @api.change("POST", "/v1/agents/{agent:path}/peers", "transfer", tags=["agents"])
    async def connect_agent(request: Request, agent: AgentId, asked: schema.ConnectRequest) -> schema.Peer:
        """Has an agent connect to another, if its owner lets the daemon move pages.

        Answers the new session, or the one that is open already.
        """
        return await daemon.dials.connect(agent, asked)

    # Behind the others, whose paths it matches too: a name may have slashes.
    @api.get("/v1/agents/{agent:path}", "read", tags=["agents"])
    async def get_agent(agent: AgentId) -> schema.AgentDetail:
        """One agent, with its options and statistics."""
        return agents.detail(agents.find(agent))

    @api.get("/v1/regions", "read", tags=["agents"])
    async def list_regions(
        agent: AgentFilter = None, cursor: Cursor = "", limit: Limit = 100
    ) -> schema.Listed[schema.Region]:
        """Regions of all agents."""
        found = [region for each in agents.some(agent) for region in agents.regions(each)]
        return paged(found, cursor, limit)

    @api.get("/v1/peers", "read", tags=["agents"])
    async def list_peers(
        agent: AgentFilter = None, cursor: Cursor = "", limit: Limit = 100
    ) -> schema.Listed[schema.Peer]:
        """Sessions of all agents."""
        return paged([peer for each in agents.some(agent) for peer in agents.peers(each)], cursor, limit)

    @api.get("/v1/rails", "read", tags=["agents"])
    async def list_rails(
        agent: AgentFilter = None, cursor: Cursor = "", limit: Limit = 100
    ) -> schema.Listed[schema.Rail]:
        """Rails that are up, one for each session and transport."""
        return paged([rail for each in agents.some(agent) for rail in agents.rails(each)], cursor, limit)
