"""The node as a whole: what it is, its health, settings and drain."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from kvxfer.control import schema
from kvxfer.control.app.api import Api
from kvxfer.control.app.guarded_route import caller_of
from kvxfer.control.daemon.node import NodeDaemon


def add_node(api: Api, daemon: NodeDaemon) -> None:
    """Adds them."""

    @api.get("/healthz", None, tags=["node"])
    async def healthz() -> schema.Health:
        """Answers while the daemon runs."""
        return schema.Health()

    @api.get(
        "/readyz",
        None,
        tags=["node"],
        responses={503: {"model": schema.Readiness, "description": "Not ready, and why"}},
    )
    async def readyz(response: Response) -> schema.Readiness:
        """Whether it takes work; if not, the status is 503 and the body has the reasons."""
        found = daemon.readiness()
        response.status_code = 200 if found.ready else 503
        return found

    @api.get("/v1/node", "read", tenants=True, tags=["node"])
    async def get_node() -> schema.Node:
        """The daemon that answers."""
        return daemon.shown()

    @api.get("/v1/topology", "read", tags=["node"])
    async def get_topology() -> schema.Topology:
        """The machine, its agents, and their sessions with their rails."""
        return await daemon.topology()

    @api.get("/v1/doctor", "read", tags=["node"])
    async def get_doctor(
        require: Annotated[
            str, Query(max_length=256, description="Transports that must work, e.g. shm,tcp")
        ] = "",
    ) -> schema.Doctor:
        """The findings of ``kvxfer doctor``; kept for ten seconds."""
        return await daemon.doctor(tuple(name.strip() for name in require.split(",") if name.strip()))

    @api.get("/v1/settings", "read", tenants=True, tags=["node"])
    async def get_settings(request: Request) -> schema.Settings:
        """Settings that can change while the daemon runs; a tenant's token sees those of its tenants."""
        return daemon.settings.shown(caller_of(request).tenants)

    @api.change("PATCH", "/v1/settings", "admin", tags=["node"])
    async def change_settings(request: Request, asked: schema.SettingsChange) -> schema.Settings:
        """Changes the settings that are named, and no others."""
        return await daemon.settings.change(asked)

    @api.get("/v1/drain", "read", tenants=True, tags=["node"])
    async def get_drain(request: Request) -> schema.Drain:
        """Whether the node drains, and is ready to stop; a tenant's token sees no agents."""
        shown = daemon.drains.shown()
        return shown if caller_of(request).tenants is None else shown.model_copy(update={"agents": []})

    @api.change("PUT", "/v1/drain", "admin", needs="reserve", tags=["node"])
    async def begin_drain(request: Request, asked: schema.DrainRequest) -> schema.Drain:
        """Refuses new work from now on; running work goes on."""
        return await daemon.drains.begin(asked.deadline_s)

    @api.change("DELETE", "/v1/drain", "admin", needs="reserve", tags=["node"])
    async def end_drain(request: Request) -> schema.Drain:
        """Ends the drain."""
        return await daemon.drains.end()
