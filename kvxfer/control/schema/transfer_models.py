"""Transfers: the request for one, and the record of both its ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvxfer.control.schema.base import (
    WHOLE,
    Address,
    Blocks,
    Context,
    LeaseText,
    Name,
    RequestModel,
    ResponseModel,
    Seconds,
    Tenant,
    TransferState,
)


class TransferRequest(RequestModel):
    """A copy of blocks between a region of `agent` and one of `remote_agent`, begun by `agent`."""

    agent: Name = Field(description="Id or name of an attached agent, or of the daemon's own agent")
    verb: Literal["read", "write"] = "read"
    region: Name
    remote_agent: Address = Field(description="Name or id of a peer, or an allowed address")
    remote_region: Name
    src_blocks: Blocks
    dst_blocks: Blocks
    layers: (
        Annotated[list[Annotated[int, Field(ge=0, le=65536)]], Field(min_length=2, max_length=2), WHOLE]
        | None
    ) = Field(
        default=None,
        description="[first, stop]: layers first to stop - 1, numbered model-wide; null: all that both "
        "ends hold",
    )
    lease: LeaseText | None = None
    notify: Context | None = Field(
        default=None,
        description="To write: the tag of the other end's `expect`, or else the notification that it gets "
        "when the bytes are there. To read: the notification that it gets when they are here",
    )
    timeout_s: Seconds = 30.0
    priority: Annotated[int, Field(ge=0, le=255, description="0 goes first"), WHOLE] = 0
    context: Context = Field(
        default="", description="The request that it belongs to; may contain a W3C traceparent"
    )
    tenant: Tenant = ""


class TransferEnd(ResponseModel):
    """How one end ended. Durations count from `posted_at_s`; null means not reached, or not known."""

    agent: str
    agent_name: str
    began_it: bool
    region: int
    region_name: str = Field(description='The name at registration; "" if it is not known')
    peer: str = Field(description="Id of the agent at the other end, attached here or not")
    peer_name: str
    remote_region: int
    remote_region_name: str
    outcome: TransferState
    state: str
    code: str
    message: str
    rails: list[str]
    num_blocks: int
    num_layers: int
    nbytes: int
    nbytes_done: int
    posted_at_s: float
    begun_after_us: float | None
    first_piece_after_us: float | None
    ended_after_us: float | None


class Transfer(ResponseModel):
    """One copy, with both ends as far as their agents are attached here.

    Every daemon that knows one of the ends uses the same `id`. Until an agent has reported a transfer that
    was made here, its `id` is its `made_id`. The `made_id` stays valid for finding the transfer.
    """

    id: str
    made_id: str | None = Field(description="The id that its creation answered, if it was created here")
    state: TransferState
    code: str
    message: str
    context: str
    trace_parent: str | None
    tenant: str
    priority: int
    num_blocks: int
    num_layers: int
    nbytes: int
    created_by: str | None = Field(
        description="The name of the token that created it, if it was created here"
    )
    updated_at_s: float
    source: TransferEnd | None
    destination: TransferEnd | None
    expectation: TransferEnd | None


class Cancelled(ResponseModel):
    id: str
    found: bool = Field(description="False: it had ended")
