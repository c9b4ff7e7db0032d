"""A request that both engines are sent at once: what a router tells each of them beforehand.

By a key decode's registration and prefill's request find each other. A router of kvxfer's draws it, and
tells decode where prefill's ranks are as well (it has that from prefill's last response). Where it gives
both engines one request by one name instead, each makes the key of that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kvxfer.address import Address
from kvxfer.connectors.common.engine_request import EngineRequest
from kvxfer.connectors.common.handover import (
    MAX_RANKS,
    VERSION,
    Handover,
    HandoverError,
    Rank,
    parsed,
    prompt_digest,
    require_allowed,
    require_version,
)
from kvxfer.connectors.common.notes import KEY_NBYTES
from kvxfer.connectors.common.place import some_agent
from kvxfer.connectors.common.settings import Settings
from kvxfer.directory import Entry
from kvxfer.errors import UsageError

_Key = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Size = Annotated[int, Field(ge=1, le=MAX_RANKS)]


class _Prefill(BaseModel):
    """The part under ``kvxfer``, as prefill gets it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int
    push: _Key


class _Decode(_Prefill):
    """The part under ``kvxfer``, as decode gets it."""

    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=MAX_RANKS)]


class _Coordinates(BaseModel):
    """What decode is told where a router knows nothing of kvxfer: one host, and its first rank's port."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    remote_engine_id: Annotated[str, Field(min_length=1, max_length=1024)]
    remote_request_id: Annotated[str, Field(min_length=1, max_length=1024)]
    remote_host: Annotated[str, Field(min_length=1, max_length=256)]
    remote_port: Annotated[int, Field(ge=1, le=65535)]
    tp_size: _Size = 1
    pp_size: _Size = 1

    @property
    def ranks(self) -> tuple[Entry, ...]:
        """Their agents listen on one port after the other."""
        num_ranks = self.tp_size * self.pp_size
        if num_ranks > MAX_RANKS:
            raise HandoverError(f"{num_ranks} ranks of prefill: at most {MAX_RANKS} are read from")
        ports = range(self.remote_port, self.remote_port + num_ranks)
        try:
            return tuple(some_agent(self.remote_engine_id, Address(self.remote_host, port)) for port in ports)
        except UsageError as error:
            raise HandoverError(error.args[0]) from None


def is_push(params: dict[str, Any]) -> bool:
    """Whether a request's parameters name a key."""
    own = params.get("kvxfer")
    return isinstance(own, dict) and "push" in own


def has_coordinates(params: dict[str, Any]) -> bool:
    """Whether they tell decode where prefill is, and nothing of what it has."""
    own, tables = params.get("kvxfer"), params.get("remote_block_ids")
    return own is None and not tables and bool(params.get("remote_request_id"))


def key_of(batch: tuple[str, int], prompt: str) -> bytes:
    """Returns the key of one prompt (its `prompt_digest`) of a request that both engines call alike."""
    name, at = batch
    text = f"{at} {prompt} {name}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=KEY_NBYTES).digest()


@dataclass(frozen=True, slots=True)
class Appointment:
    """Where decode is to be pushed a request from.

    Attributes
    ----------
    key
        16 bytes that are this prompt's alone.
    ranks
        Prefill's agents, one for each rank.
    prompt
        `prompt_digest` of the request here: prefill refuses another.
    may_be_shared
        Whether other engines may be about to be pushed it, unknown to prefill.
    """

    key: bytes
    ranks: tuple[Entry, ...]
    prompt: str
    may_be_shared: bool = False

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
        digest = prompt_digest(request, request.num_prompt_tokens - num_held_back)
        if has_coordinates(params):
            told = parsed(_Coordinates, params)
            ranks = told.ranks
            key = key_of(_batch_of(request), digest)
        else:
            own = parsed(_Decode, params["kvxfer"])
            require_version(own.version)
            ranks = own.ranks
            key = _key_of_prompt(own.push, request, digest)
        require_allowed(ranks, settings)
        return cls(key, ranks, digest)

    @classmethod
    def beside(cls, handover: Handover, request: EngineRequest, num_held_back: int = 0) -> Appointment:
        """Returns what a further prompt of a request is pushed by, of which prefill told only the first.

        Raises
        ------
        HandoverError
            Prefill does not push it.
        """
        if handover.batch is None:
            raise HandoverError(
                "prefill hands over the first of several prompts in one request: send a request for each"
            )
        digest = prompt_digest(request, request.num_prompt_tokens - num_held_back)
        _, at = _batch_of(request)
        return cls(key_of((handover.batch, at), digest), handover.ranks, digest)


def read_key(params: dict[str, Any], request: EngineRequest) -> bytes:
    """Returns the key of a request that arrived at a prefill engine, and is to be pushed.

    Raises
    ------
    HandoverError
        It is none, or of another version.
    """
    digest = prompt_digest(request, request.num_prompt_tokens)
    if not is_push(params):
        return key_of(_batch_of(request), digest)
    own = parsed(_Prefill, params["kvxfer"])
    require_version(own.version)
    return _key_of_prompt(own.push, request, digest)


def is_further(request: EngineRequest) -> bool:
    """Whether a request is another prompt than the first of those that came in one."""
    return request.batch is not None and request.batch[1] > 0


def _key_of_prompt(drawn: str, request: EngineRequest, prompt: str) -> bytes:
    if request.batch is not None and is_further(request):
        return key_of((drawn, request.batch[1]), prompt)
    return bytes.fromhex(drawn)


def _batch_of(request: EngineRequest) -> tuple[str, int]:
    if request.batch is None:
        raise HandoverError(
            f"nothing in its name, {request.id!r:.200}, tells it from other requests: the router has to name "
            "it, or to draw a key for it"
        )
    return request.batch


def answer(engine_id: str, ranks: tuple[Entry, ...]) -> dict[str, Any]:
    """Returns the ``kv_transfer_params`` of a pushed request's response: where the ranks are now."""
    return {
        "remote_engine_id": engine_id,
        "kvxfer": {"version": VERSION, "ranks": [rank.to_dict() for rank in ranks]},
    }
