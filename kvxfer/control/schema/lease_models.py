"""Leases of attached agents' regions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvxfer.control.schema.base import WHOLE, Blocks, Name, RequestModel, ResponseModel, Seconds


class LeaseRequest(RequestModel):
    agent: Name
    region: Name
    blocks: Blocks | None = Field(default=None, description="null: the whole region")
    mode: Literal["read", "write"] = "read"
    holder: Name | Annotated[int, Field(ge=0, lt=2**32), WHOLE] | None = Field(
        default=None,
        description="To read: an agent's name, where engine-0/* means all names that begin with engine-0/; "
        "null: any agent with the token. To write: the number of the agent's session with the writer",
    )
    ttl_s: Seconds = 30.0


class LeaseExtension(RequestModel):
    ttl_s: Seconds


class Lease(ResponseModel):
    """A lease. Its `id` gives no access to blocks; only the answer to its grant has the token, which does."""

    id: str
    agent: str
    agent_name: str
    holder: str
    session: int | None
    region: int
    region_name: str
    mode: str
    num_blocks: int | None
    state: str
    seconds_left: float | None


class LeaseGranted(ResponseModel):
    id: str
    token: str = Field(description="Shown once; any agent with the token may use the lease")


class LeaseEnded(ResponseModel):
    id: str
    state: str
