"""Tokens, which say who may do what."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvxfer.control.schema.base import Asked, Name, Role, Tenant, Told


class TokenRequest(Asked):
    name: Name
    role: Role = "read"
    tenants: Annotated[list[Tenant], Field(min_length=1, max_length=64)] | None = None
    ttl_s: Annotated[float, Field(gt=0, le=10 * 365 * 86400, allow_inf_nan=False)] | None = None


class Token(Told):
    id: str
    name: str
    role: Role
    tenants: list[str] | None
    made_at_s: float
    expires_at_s: float | None


class TokenMade(Token):
    secret: str = Field(description="Shown once; the daemon keeps a hash of it")
