"""Leases of agents' regions."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request

from kvxfer.control import schema
from kvxfer.control.app.agent_routes import AgentFilter, Cursor, Limit, paged
from kvxfer.control.app.api import Api
from kvxfer.control.daemon.node import NodeDaemon

LeaseId = Annotated[str, Path(min_length=1, max_length=128)]


def add_leases(api: Api, daemon: NodeDaemon) -> None:
    """Adds them."""
    grants = daemon.grants

    @api.get("/v1/leases", "read", tags=["leases"])
    async def list_leases(
        agent: AgentFilter = None, cursor: Cursor = "", limit: Limit = 100
    ) -> schema.Listed[schema.Lease]:
        """Leases that hold or are ending, as the agents last reported them."""
        return paged(grants.shown(agent), cursor, limit)

    @api.change("POST", "/v1/leases", "transfer", status_code=201, tags=["leases"])
    async def grant_lease(request: Request, asked: schema.LeaseRequest) -> schema.LeaseGranted:
        """Has an agent grant a lease, if its owner permits that (``daemon_may``)."""
        return await grants.grant(asked)

    @api.change("POST", "/v1/leases/{lease}/extend", "transfer", tags=["leases"])
    async def extend_lease(
        request: Request, lease: LeaseId, asked: schema.LeaseExtension
    ) -> schema.LeaseEnded:
        """Makes the lease last at least `ttl_s` from now; it is never shortened."""
        return await grants.extend(lease, asked.ttl_s)

    @api.change("DELETE", "/v1/leases/{lease}", "transfer", needs="none", tags=["leases"])
    async def revoke_lease(request: Request, lease: LeaseId) -> schema.LeaseEnded:
        """Ends the lease; when this answers, no byte under it can be read or land any more."""
        return await grants.revoke(lease)
