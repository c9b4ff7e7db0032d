"""Pages of the host pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Path, Query, Request

from kvxfer.control import schema
from kvxfer.control.app.agent_routes import Cursor, Limit
from kvxfer.control.app.api import Api
from kvxfer.control.app.guarded_route import caller_of, require_all_tenants
from kvxfer.control.daemon.node import NodeDaemon
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.tokens import Caller

if TYPE_CHECKING:
    from kvxfer.control.host_pool.page_desk import PageDesk

PageLeaseId = Annotated[str, Path(min_length=1, max_length=32)]


def add_pages(api: Api, daemon: NodeDaemon) -> None:
    """Adds them."""

    def pages() -> PageDesk:
        if daemon.makes_own:
            raise Refusal(
                "unavailable", "the daemon is starting, and its own agent is not ready yet", retry_after_s=1
            )
        if daemon.pages is None:
            raise Refusal("not-found", "this daemon keeps no pages: start it with --pool-gib")
        return daemon.pages

    def require(caller: Caller, tenant: str) -> None:
        if not caller.sees(tenant):
            raise Refusal("forbidden", f"{caller.name} may not use pages of tenant {tenant!r}")

    def require_as_many(asked: schema.ParkRequest | schema.FetchRequest) -> None:
        if len(asked.keys) != len(asked.blocks):
            raise Refusal(
                "length-mismatch",
                f"keys: {len(asked.keys)}, blocks: {len(asked.blocks)}; name one block for each key",
            )

    def note(topic: str, asked: schema.PagesRequest | schema.ParkRequest) -> None:
        told = {"tenant": asked.tenant, "model": asked.model, "keys": len(asked.keys)}
        daemon.note(topic, told, asked.tenant)

    @api.get("/v1/pages", "read", tenants=True, tags=["pages"])
    async def list_pages(
        request: Request,
        tenant: Annotated[str | None, Query(max_length=128)] = None,
        cursor: Cursor = "",
        limit: Limit = 100,
    ) -> schema.Listed[schema.Page]:
        """Pages in the order of their parking."""
        if daemon.pages is None:
            return schema.Listed[schema.Page](items=[])
        return await daemon.pages.listed(caller_of(request).tenants, tenant, cursor, limit)

    @api.change("POST", "/v1/pages/park", "transfer", tenants=True, tags=["pages"])
    async def park_pages(request: Request, asked: schema.ParkRequest) -> schema.PagesDone:
        """Copies blocks of an agent's region into the pool. When this answers, the pages can be fetched.

        A token of some tenants needs a `lease`, which proves its right to the blocks.
        """
        caller = caller_of(request)
        require(caller, asked.tenant)
        if asked.lease is None:
            require_all_tenants(caller, "parking without a lease")
        daemon.drains.require_open()
        require_as_many(asked)
        done = await pages().park(asked)
        note("pages.parked", asked)
        return done

    @api.change("POST", "/v1/pages/fetch", "transfer", tags=["pages"])
    async def fetch_pages(request: Request, asked: schema.FetchRequest) -> schema.PagesDone:
        """Copies pages into blocks of an agent's region: all of them, or none if one is missing."""
        caller = caller_of(request)
        require(caller, asked.tenant)
        daemon.drains.require_open()
        require_as_many(asked)
        return await pages().fetch(asked)

    @api.change("POST", "/v1/pages/lease", "transfer", tenants=True, status_code=201, tags=["pages"])
    async def lease_pages(request: Request, asked: schema.PageLeaseRequest) -> schema.PageLease:
        """Grants a right to read pages, with the descriptors that ``agent.read`` takes."""
        require(caller_of(request), asked.tenant)
        daemon.drains.require_open()
        return await pages().lease(asked)

    @api.change("POST", "/v1/pages/lease/{lease}/extend", "transfer", tenants=True, tags=["pages"])
    async def extend_page_lease(
        request: Request, lease: PageLeaseId, asked: schema.LeaseExtension
    ) -> schema.LeaseEnded:
        """Makes the lease last `ttl_s` from now."""
        return await pages().extend(lease, asked.ttl_s, caller_of(request).tenants)

    @api.change("DELETE", "/v1/pages/lease/{lease}", "transfer", needs="none", tenants=True, tags=["pages"])
    async def revoke_page_lease(request: Request, lease: PageLeaseId) -> schema.LeaseEnded:
        """Ends the lease; when this answers, no agent reads pages under it."""
        return await pages().revoke(lease, caller_of(request).tenants)

    @api.change("POST", "/v1/pages/pin", "transfer", tenants=True, tags=["pages"])
    async def pin_pages(request: Request, asked: schema.PagesRequest) -> schema.PagesDone:
        """Keeps pages from being evicted."""
        require(caller_of(request), asked.tenant)
        return await pages().pin(asked, pinned=True)

    @api.change("POST", "/v1/pages/unpin", "transfer", needs="none", tenants=True, tags=["pages"])
    async def unpin_pages(request: Request, asked: schema.PagesRequest) -> schema.PagesDone:
        """Permits pages to be evicted again."""
        require(caller_of(request), asked.tenant)
        return await pages().pin(asked, pinned=False)

    @api.change("POST", "/v1/pages/drop", "transfer", needs="none", tenants=True, tags=["pages"])
    async def drop_pages(request: Request, asked: schema.PagesRequest) -> schema.PagesDone:
        """Removes pages and ends leases on them; when this answers, no agent reads them."""
        require(caller_of(request), asked.tenant)
        done = await pages().drop(asked)
        note("pages.dropped", asked)
        return done

    @api.get("/v1/pools", "read", tenants=True, tags=["pages"])
    async def list_pools(request: Request) -> schema.Listed[schema.Pool]:
        """The host pool, if there is one."""
        desk = daemon.pages
        return schema.Listed[schema.Pool](
            items=[] if desk is None else list(desk.pools(caller_of(request).tenants))
        )
