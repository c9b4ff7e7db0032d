"""The parameters of a push: a router sends one request to both engines at once.

A key matches decode's registration to prefill's request. A router that knows kvxfer draws the key, and tells
decode the addresses of prefill's ranks (from prefill's last response). Another router gives both engines the
same request name; each engine then derives the key from that name.
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
    Version,
    parsed,
    prompt_digest,
    require_allowed,
    require_version,
)
from kvxfer.connectors.common.notes import KEY_NBYTES
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.worker_rank import some_agent
from kvxfer.directory import Entry
from kvxfer.errors import UsageError

_Key = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Size = Annotated[int, Field(ge=1, le=MAX_RANKS)]


class _Prefill(BaseModel):
    """The parameters under ``kvxfer`` that prefill receives."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: Version
    push: _Key


class _Decode(_Prefill):
    """The parameters under ``kvxfer`` that decode receives."""

    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=MAX_RANKS)]


class _Coordinates(BaseModel):
    """The parameters from a router that does not know kvxfer: prefill's host, and its first rank's port."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    remote_engine_id: Annotated[str, Field(min_length=1, max_length=1024)]
    remote_request_id: Annotated[str, Field(min_length=1, max_length=1024)]
    remote_host: Annotated[str, Field(min_length=1, max_length=256)]
    remote_port: Annotated[int, Field(ge=1, le=65535)]
    tp_size: _Size = 1
    pp_size: _Size = 1

    @property
    def ranks(self) -> tuple[Entry, ...]:
        """Prefill's agents; they listen on consecutive ports."""
        num_ranks = self.tp_size * self.pp_size
        if num_ranks > MAX_RANKS:
            raise HandoverError(f"prefill has {num_ranks} ranks: this engine reads from at most {MAX_RANKS}")
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
    """Whether a request's parameters give decode prefill's address, but no blocks."""
    own, tables = params.get("kvxfer"), params.get("remote_block_ids")
    return own is None and not tables and bool(params.get("remote_request_id"))


def key_of(batch: tuple[str, int], prompt: str) -> bytes:
    """Returns the key of one prompt, given by its `prompt_digest`; both engines name the request alike."""
    name, at = batch
    text = f"{at} {prompt} {name}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=KEY_NBYTES).digest()


@dataclass(frozen=True, slots=True)
class ExpectedPush:
    """The push that a decode engine expects for one prompt.

    Attributes
    ----------
    key
        16 bytes, unique to this prompt.
    ranks
        Prefill's agents, one for each rank.
    prompt
        `prompt_digest` of the request at decode; prefill refuses a different one.
    may_be_shared
        Whether prefill may have to push the request to other engines that it does not know yet.
    """

    key: bytes
    ranks: tuple[Entry, ...]
    prompt: str
    may_be_shared: bool = False

    @classmethod
    def read(
        cls, params: dict[str, Any], request: EngineRequest, settings: Settings, num_held_back: int = 0
    ) -> ExpectedPush:
        """Reads the parameters of a request that arrived at a decode engine.

        Prefill omits the last `num_held_back` tokens of the request's prompt.

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
    def beside(cls, handover: Handover, request: EngineRequest, num_held_back: int = 0) -> ExpectedPush:
        """Returns the expected push of a further prompt of a request, from the handover of its first prompt.

        Raises
        ------
        HandoverError
            Prefill does not push it.
        """
        if handover.batch is None:
            raise HandoverError(
                "prefill hands over only the first of a request's prompts: send a request for each prompt"
            )
        digest = prompt_digest(request, request.num_prompt_tokens - num_held_back)
        _, at = _batch_of(request)
        return cls(key_of((handover.batch, at), digest), handover.ranks, digest)


def read_key(params: dict[str, Any], request: EngineRequest) -> bytes:
    """Returns the key of a request that arrived at a prefill engine and is to be pushed.

    Raises
    ------
    HandoverError
        The parameters have no valid key, or are of another version.
    """
    digest = prompt_digest(request, request.num_prompt_tokens)
    if not is_push(params):
        return key_of(_batch_of(request), digest)
    own = parsed(_Prefill, params["kvxfer"])
    require_version(own.version)
    return _key_of_prompt(own.push, request, digest)


def is_further(request: EngineRequest) -> bool:
    """Whether this is the second or a later prompt of a request with several prompts."""
    return request.batch is not None and request.batch[1] > 0


def _key_of_prompt(drawn: str, request: EngineRequest, prompt: str) -> bytes:
    if request.batch is not None and is_further(request):
        return key_of((drawn, request.batch[1]), prompt)
    return bytes.fromhex(drawn)


def _batch_of(request: EngineRequest) -> tuple[str, int]:
    if request.batch is None:
        raise HandoverError(
            f"its name, {request.id!r:.200}, does not distinguish it from other requests: the router must "
            "name it, or draw a key for it"
        )
    return request.batch


def answer(engine_id: str, ranks: tuple[Entry, ...]) -> dict[str, Any]:
    """Returns the ``kv_transfer_params`` of a pushed request's response: the ranks' current addresses."""
    return {
        "remote_engine_id": engine_id,
        "kvxfer": {"version": VERSION, "ranks": [rank.to_dict() for rank in ranks]},
    }
