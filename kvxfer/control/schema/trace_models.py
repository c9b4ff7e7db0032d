"""A request's way, as rows of one timeline."""

from __future__ import annotations

from pydantic import Field

from kvxfer.control.schema.base import ResponseModel


class TraceRow(ResponseModel):
    """Something that took time: an end of a transfer, a stage of it, or a span of an engine or router."""

    process: str = Field(description="The agent's name, or the engine's or router's in its spans")
    lane: str = Field(description="Rows of one lane and process are nested: a transfer, or a trace")
    name: str
    started_at_s: float
    took_us: float
    depth: int = Field(description="In how many rows of its lane it is nested")
    error: str = Field(description='Why it failed; "" if it did not')
    details: dict[str, str]


class RequestTrace(ResponseModel):
    """What one daemon knows of a request; the rows are ordered by their start."""

    request: str
    traces: list[str] = Field(description="W3C trace ids")
    rows: list[TraceRow]
