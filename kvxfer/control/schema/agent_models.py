"""Agents that are attached, with their regions, peers and rails."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvxfer.control.schema.base import Address, RequestModel, ResponseModel
from kvxfer.control.schema.node_models import PeerLimit


class Agent(ResponseModel):
    id: str = Field(description="The agent's incarnation, in hexadecimal digits")
    name: str
    address: str
    pid: int
    uid: int
    host: str
    version: str
    may: list[str]
    draining: bool
    attached_at_s: float
    regions: int
    peers: int
    leases: int
    records_dropped: int


class AgentDetail(Agent):
    options: dict[str, Any]
    stats: dict[str, Any]
    rails_off: list[str] = Field(description="Transports whose rails are switched off")
    limits: dict[str, PeerLimit] = Field(
        description="By the peer's name; only the first if there are very many"
    )


class Region(ResponseModel):
    agent: str
    agent_name: str
    id: int
    name: str
    kind: str
    num_blocks: int
    nbytes: int
    layout: dict[str, Any] | None
    notes: list[str]


class Rail(ResponseModel):
    agent: str
    agent_name: str
    peer: str
    peer_name: str
    session: int
    transport: str
    state: Literal["up", "off"] = Field(
        default="up",
        description="`off`: switched off in all sessions of the agent; `peer` is empty",
    )


class ConnectRequest(RequestModel):
    """A session of one agent with another."""

    remote_agent: Address = Field(description="Name or id of an attached agent, or an allowed address")


class Peer(ResponseModel):
    agent: str
    agent_name: str
    session: int
    id: str = Field(description="The peer's incarnation")
    name: str
    address: str
    rails: list[str]
    paths: list[str]
    notes: list[str]
    regions: list[str]
