"""Transfers: creating, watching, cancelling and listing them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request

from kvxfer.control import schema
from kvxfer.control.app.agent_routes import AgentFilter, Cursor, Limit
from kvxfer.control.app.api import Api
from kvxfer.control.app.guarded_route import caller_of
from kvxfer.control.daemon.node import NodeDaemon

TransferId = Annotated[str, Path(min_length=1, max_length=128)]


def add_transfers(api: Api, daemon: NodeDaemon) -> None:
    """Adds them."""
    moves = daemon.moves

    @api.change("POST", "/v1/transfers", "transfer", status_code=201, tags=["transfers"])
    async def create_transfer(request: Request, asked: schema.TransferRequest) -> schema.Transfer:
        """Has an agent copy blocks; answers when the transfer is posted."""
        caller = caller_of(request)
        return await moves.create(asked, caller)

    @api.get("/v1/transfers", "read", tenants=True, tags=["transfers"])
    async def list_transfers(
        request: Request,
        agent: AgentFilter = None,
        state: Annotated[schema.TransferState | None, Query()] = None,
        context: Annotated[
            str | None, Query(max_length=128, description="The whole context, or a trace id in it")
        ] = None,
        tenant: Annotated[str | None, Query(max_length=128)] = None,
        since_s: Annotated[
            float | None,
            Query(
                ge=0,
                le=1e12,
                allow_inf_nan=False,
                description="Only transfers that changed at or after this time",
            ),
        ] = None,
        cursor: Cursor = "",
        limit: Limit = 100,
    ) -> schema.Listed[schema.Transfer]:
        """Transfers that were made here, or have an end that has ended; the newest first.

        Each call examines a bounded number of them: a page may be short, or empty, and still have a `next`.
        """
        return moves.listed(
            caller_of(request),
            agent=agent,
            state=state,
            context=context,
            tenant=tenant,
            since_s=since_s,
            cursor=cursor,
            limit=limit,
        )

    @api.get("/v1/open-transfers", "read", tenants=True, tags=["transfers"])
    async def list_open_transfers(
        request: Request, agent: AgentFilter = None, limit: Limit = 100
    ) -> schema.Listed[schema.Transfer]:
        """Transfers that are open now; each agent has two seconds to answer."""
        return await moves.list_open(caller_of(request), agent, limit)

    @api.get("/v1/transfers/{transfer}", "read", tenants=True, tags=["transfers"])
    async def get_transfer(
        request: Request,
        transfer: TransferId,
        wait_s: Annotated[
            float,
            Query(
                ge=0,
                le=60,
                allow_inf_nan=False,
                description="How long to wait for the transfer to end before answering",
            ),
        ] = 0.0,
    ) -> schema.Transfer:
        """One transfer, with the stages of both ends."""
        return await moves.get(transfer, caller_of(request), wait_s)

    @api.change(
        "DELETE", "/v1/transfers/{transfer}", "transfer", needs="none", tenants=True, tags=["transfers"]
    )
    async def delete_transfer(request: Request, transfer: TransferId) -> schema.Cancelled:
        """Cancels a transfer; its record stays."""
        return await moves.cancel(transfer, caller_of(request))

    @api.change(
        "POST", "/v1/transfers/{transfer}/cancel", "transfer", needs="none", tenants=True, tags=["transfers"]
    )
    async def cancel_transfer(request: Request, transfer: TransferId) -> schema.Cancelled:
        """Cancels a transfer; its record stays."""
        return await moves.cancel(transfer, caller_of(request))
