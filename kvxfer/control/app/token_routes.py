"""Tokens, and the caller's own identity."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request

from kvxfer.control import schema
from kvxfer.control.app.agent_routes import Cursor, Limit, paged
from kvxfer.control.app.api import Api
from kvxfer.control.app.guarded_route import caller_of
from kvxfer.control.daemon.node import NodeDaemon


def add_tokens(api: Api, daemon: NodeDaemon) -> None:
    """Adds them."""
    tokens = daemon.tokens

    @api.get("/v1/whoami", "read", tenants=True, tags=["tokens"])
    async def whoami(request: Request) -> schema.WhoAmI:
        """The caller, as the daemon has identified it."""
        caller = caller_of(request)
        tenants = None if caller.tenants is None else sorted(caller.tenants)
        return schema.WhoAmI.model_validate({"name": caller.name, "role": caller.role, "tenants": tenants})

    @api.get("/v1/tokens", "admin", tags=["tokens"])
    async def list_tokens(
        request: Request, cursor: Cursor = "", limit: Limit = 100
    ) -> schema.Listed[schema.Token]:
        """Tokens that are not revoked, including those that have expired."""
        return paged(tokens.shown(), cursor, limit)

    @api.change("POST", "/v1/tokens", "admin", repeats=False, status_code=201, tags=["tokens"])
    async def create_token(request: Request, asked: schema.TokenRequest) -> schema.TokenMade:
        """Makes a token; only this answer has its secret."""
        return await tokens.make(asked)

    @api.change("DELETE", "/v1/tokens/{token}", "admin", needs="reserve", tags=["tokens"])
    async def revoke_token(
        request: Request, token: Annotated[str, Path(min_length=1, max_length=64)]
    ) -> schema.Token:
        """Revokes a token: its next request is refused, and its event streams end."""
        return await tokens.revoke(token, caller_of(request))
