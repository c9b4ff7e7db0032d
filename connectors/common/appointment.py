"""A request that both engines are sent at once: what a router tells each of them beforehand.

Prefill is told a key, decode the key and where prefill's ranks are (the router has that from prefill's
last response). By the key decode's registration and prefill's request find each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kvxfer.connectors.common.engine_request import EngineRequest
from kvxfer.connectors.common.handover import (
    MAX_RANKS,
    VERSION,
    Rank,
    parsed,
    prompt_digest,
    require_allowed,
    require_version,
)
from kvxfer.connectors.common.settings import Settings
from kvxfer.directory import Entry

_Key = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Prefill(BaseModel):
    """The part under ``kvxfer``, as prefill gets it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int
    push: _Key


class _Decode(_Prefill):
    """The part under ``kvxfer``, as decode gets it."""

    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=MAX_RANKS)]


def is_push(params: dict[str, Any]) -> bool:
    """Whether a request's parameters name a key."""
    own = params.get("kvxfer")
    return isinstance(own, dict) and "push" in own


@dataclass(frozen=True, slots=True)
class Appointment:
    """Where decode is to be pushed a request from.

    Attributes
    ----------
    key
        16 bytes that the router drew for this request alone.
    ranks
        Prefill's agents, one for each rank.
    prompt
        `prompt_digest` of the request here: prefill refuses another.
    """

    key: bytes
    ranks: tuple[Entry, ...]
    prompt: str

    @classmethod
    def read(
        cls, params: dict[str, Any], request: EngineRequest, settings: Settings, num_held_back: int = 0
    ) -> Appointment:
        """Reads the parameters of a request that arrived at a decode engine.

        Prefill does not compute the last `num_held_back` tokens of its prompt.

        Raises
        ------
        HandoverError
            Missing or absurd fields, another version, a host that may not be dialled.
        """
        own = parsed(_Decode, params["kvxfer"])
        require_version(own.version)
        require_allowed(own.ranks, settings)
        digest = prompt_digest(request, request.num_prompt_tokens - num_held_back)
        return cls(bytes.fromhex(own.push), own.ranks, digest)


def read_key(params: dict[str, Any]) -> bytes:
    """Returns the key of a request that arrived at a prefill engine.

    Raises
    ------
    HandoverError
        It is none, or of another version.
    """
    own = parsed(_Prefill, params["kvxfer"])
    require_version(own.version)
    return bytes.fromhex(own.push)


def answer(engine_id: str, ranks: tuple[Entry, ...]) -> dict[str, Any]:
    """Returns the ``kv_transfer_params`` of a pushed request's response: where the ranks are now."""
    return {
        "remote_engine_id": engine_id,
        "kvxfer": {"version": VERSION, "ranks": [rank.to_dict() for rank in ranks]},
    }
