"""The node as a whole: health, settings, drain, doctor, topology, events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvxfer.control.schema.base import WHOLE, Asked, LogLevel, Name, Role, Seconds, Tenant, Told


class Node(Told):
    """Which daemon answers; `incarnation` is another one after each start."""

    node: str
    incarnation: str
    version: str
    agent: str | None = Field(description="Id of the daemon's own agent; null where it has none")
    address: str
    started_at_s: float
    draining: bool


class Health(Told):
    status: Literal["ok"] = "ok"


class Readiness(Told):
    ready: bool
    reasons: list[str]


class WhoAmI(Told):
    name: str
    role: Role
    tenants: list[str] | None = Field(description="null: every tenant")


class Link(Told):
    source: str
    destination: str
    rails: list[str]


class Topology(Told):
    machine: dict[str, Any]
    agents: list[str]
    links: list[Link]


class Finding(Told):
    subject: str
    name: str
    state: str
    found: str
    why: str
    change: str


class Doctor(Told):
    """What ``kvxfer doctor --json`` prints."""

    findings: list[Finding]
    ok: bool
    machine: dict[str, Any]


class PeerLimit(Told):
    """What an agent holds peers of one name to (`Agent.limit`)."""

    max_bytes_per_s: int | None = Field(
        default=None, description="Of pages that it takes from them; null: any rate"
    )
    least_priority: int = Field(
        default=0, description="The lowest priority number of transfers that it posts with them"
    )


class AgentSettings(Told):
    """What agents of one name are set to; kept over restarts, of the daemon and of theirs."""

    peers: dict[str, PeerLimit] = Field(default_factory=dict, description="By the peer's name")
    rails: dict[str, Literal["off"]] = Field(
        default_factory=dict, description="By transport: those that are switched off"
    )
    refused: dict[str, str] = Field(
        default_factory=dict,
        description="By agent's id, of those that attached later: why it does not hold there",
    )


class Settings(Told):
    """What can be changed while the daemon runs. Kept over restarts, but the agents' own levels."""

    log_level: LogLevel
    agents_log_level: dict[str, LogLevel] = Field(description="By agent's id, of those that were set")
    page_quotas_nbytes: dict[str, int] = Field(
        description="By tenant; a tenant that is not named has no bound"
    )
    tenant_bytes_per_s: dict[str, int] = Field(
        default_factory=dict,
        description="By tenant: what its parks, fetches and transfers may ask for; not named, no bound",
    )
    agents: dict[str, AgentSettings] = Field(
        default_factory=dict, description="By agent's name, of those for which something is set"
    )


class PeerLimitChange(Asked):
    """Replaces what was set for a peer: what is left out has no limit."""

    max_bytes_per_s: Annotated[int, Field(ge=1, le=2**50), WHOLE] | None = None
    least_priority: Annotated[int, Field(ge=0, le=255), WHOLE] = 0


class AgentSettingsChange(Asked):
    """What is left out stays; null takes a peer's limits away."""

    # Without `additionalProperties` a schema lets keys of another pattern have any value.
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


class SettingsChange(Asked):
    """What is left out stays; null takes a quota, a rate or all that is set for an agent away."""

    log_level: LogLevel | None = None
    # Without `additionalProperties` a schema lets keys of another pattern have any value.
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


class DrainRequest(Asked):
    deadline_s: Seconds = 300.0


class DrainAgent(Told):
    agent: str
    name: str
    draining: bool
    open_transfers: int
    refused: str = Field(default="", description="Why it was not asked, in words")


class Drain(Told):
    """Whether new work is refused; `ready` once nothing runs any more."""

    draining: bool
    ready: bool
    deadline_at_s: float | None = None
    running: int = Field(description="Transfers that still run, of the daemon and of agents that drain")
    agents: list[DrainAgent]


class Event(Told):
    """One of /v1/events; `index` grows by one each, over restarts as well."""

    index: int
    topic: str
    at_s: float
    data: dict[str, Any]
