"""Tokens, which say who may do what."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from kvxfer.control.schema.base import Name, RequestModel, ResponseModel, Role, Tenant
from kvxfer.control.schema.client_certificate import NAME


class TokenRequest(RequestModel):
    name: Name
    role: Role = "read"
    tenants: Annotated[list[Tenant], Field(min_length=1, max_length=64)] | None = None
    certificate: Annotated[str, StringConstraints(max_length=300, pattern=NAME)] | None = Field(
        default=None,
        description="Instead of a secret: a client with this certificate, issued by the authority "
        "that --tls-client-ca names. DNS:host or URI:... of its subjectAltName, CN:... of its "
        "subject, or SHA256:digest of the whole certificate",
    )
    ttl_s: Annotated[float, Field(gt=0, le=10 * 365 * 86400, allow_inf_nan=False)] | None = None


class Token(ResponseModel):
    id: str
    name: str
    role: Role
    tenants: list[str] | None
    made_at_s: float
    expires_at_s: float | None
    certificate: str | None = Field(
        default=None, description="The name of the certificate that the token is for"
    )


class TokenMade(Token):
    secret: str | None = Field(
        description="Shown once; the daemon keeps a hash of it. null if the token is for a certificate"
    )
