"""The node as a whole: health, settings, drain, doctor, topology, events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvxfer.control.schema.base import (
    WHOLE,
    LogLevel,
    Name,
    RequestModel,
    ResponseModel,
    Role,
    Seconds,
    Tenant,
)


class Node(ResponseModel):
    """The daemon that answers; each start has a new `incarnation`."""

    node: str
    incarnation: str
    version: str
    agent: str | None = Field(description="Id of the daemon's own agent; null if it has none")
    address: str
    started_at_s: float
    draining: bool


class Health(ResponseModel):
    status: Literal["ok"] = "ok"


class Readiness(ResponseModel):
    ready: bool
    reasons: list[str]


class WhoAmI(ResponseModel):
    name: str
    role: Role
    tenants: list[str] | None = Field(description="null: every tenant")


class Link(ResponseModel):
    source: str
    destination: str
    rails: list[str]


class Topology(ResponseModel):
    machine: dict[str, Any]
    agents: list[str]
    links: list[Link]


class Finding(ResponseModel):
    subject: str
    name: str
    state: str
    found: str
    why: str
    change: str


class Doctor(ResponseModel):
    """What ``kvxfer doctor --json`` prints."""

    findings: list[Finding]
    ok: bool
    machine: dict[str, Any]


class PeerLimit(ResponseModel):
    """The limits that an agent applies to peers of one name (`Agent.limit`)."""

    max_bytes_per_s: int | None = Field(
        default=None, description="Rate of pages that the agent takes from them; null: any rate"
    )
    least_priority: int = Field(
        default=0, description="Lowest priority number of transfers that the agent posts with them"
    )


class AgentSettings(ResponseModel):
    """The settings of agents of one name; kept over restarts of the daemon and of the agents."""

    peers: dict[str, PeerLimit] = Field(default_factory=dict, description="By the peer's name")
    rails: dict[str, Literal["off"]] = Field(
        default_factory=dict, description="The transports that are switched off"
    )
    refused: dict[str, str] = Field(
        default_factory=dict,
        description="By id of an agent that attached later: why the settings do not apply there",
    )


class Settings(ResponseModel):
    """Settings that can change at run time. All but the agents' log levels are kept over restarts."""

    log_level: LogLevel
    agents_log_level: dict[str, LogLevel] = Field(description="By id of the agents whose level was set")
    page_quotas_nbytes: dict[str, int] = Field(
        description="By tenant; a tenant that is not named has no limit"
    )
    tenant_bytes_per_s: dict[str, int] = Field(
        default_factory=dict,
        description="By tenant: rate of parks, fetches and transfers; one that is not named has no limit",
    )
    agents: dict[str, AgentSettings] = Field(
        default_factory=dict, description="By name of the agents that have settings"
    )


class PeerLimitChange(RequestModel):
    """Replaces a peer's limits: a limit that is left out is removed."""

    max_bytes_per_s: Annotated[int, Field(ge=1, le=2**50), WHOLE] | None = None
    least_priority: Annotated[int, Field(ge=0, le=255), WHOLE] = 0


class AgentSettingsChange(RequestModel):
    """Changes an agent's settings: what is left out stays; null removes a peer's limits."""

    # Without `additionalProperties` the schema would accept any value under a key that does not match.
    peers: (
        Annotated[
            dict[Name, PeerLimitChange | None],
            Field(max_length=256, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = None
    rails: (
        Annotated[
            dict[Name, Literal["on", "off"]],
            Field(max_length=16, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = None


class SettingsChange(RequestModel):
    """Changes settings: what is left out stays; null removes a quota, a rate or all settings of an agent."""

    log_level: LogLevel | None = None
    # Without `additionalProperties` the schema would accept any value under a key that does not match.
    agents_log_level: (
        Annotated[
            dict[Name, LogLevel], Field(max_length=256, json_schema_extra={"additionalProperties": False})
        ]
        | None
    ) = None
    page_quotas_nbytes: (
        Annotated[
            dict[Tenant, Annotated[int, Field(ge=0, le=2**50), WHOLE] | None],
            Field(max_length=1024, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = None
    tenant_bytes_per_s: (
        Annotated[
            dict[Tenant, Annotated[int, Field(ge=1, le=2**50), WHOLE] | None],
            Field(max_length=1024, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = None
    agents: (
        Annotated[
            dict[Name, AgentSettingsChange | None],
            Field(max_length=64, json_schema_extra={"additionalProperties": False}),
        ]
        | None
    ) = None


class DrainRequest(RequestModel):
    deadline_s: Seconds = 300.0


class DrainAgent(ResponseModel):
    agent: str
    name: str
    draining: bool
    open_transfers: int
    refused: str = Field(default="", description="Why the agent was not drained, in words")


class Drain(ResponseModel):
    """Whether new work is refused; `ready` is true when nothing is running, or the deadline is over."""

    draining: bool
    ready: bool
    deadline_at_s: float | None = None
    running: int = Field(description="Transfers that still run, of the daemon and of agents that drain")
    agents: list[DrainAgent]


class Event(ResponseModel):
    """One event of /v1/events; `index` keeps growing over restarts."""

    index: int
    topic: str
    at_s: float
    data: dict[str, Any]
