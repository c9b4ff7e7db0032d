"""The handover of a finished request: parameters that a router carries to the engine that continues it.

Usually prefill writes them for decode. For a later turn, decode writes them for the prefill of that turn.

The fields beside ``kvxfer`` are those that routers already pass and read. The fields that this connector
needs are under ``kvxfer``. Clients can send any of them, so an engine trusts none: `params_of` and `parsed`
check their types and ranges, `Handover.read` checks everything else that it can check without a connection,
and prefill's agents check the rest by their leases.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError

import kvxfer
from kvxfer.address import Address
from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.connectors.common.engine_request import EngineRequest
from kvxfer.connectors.common.settings import Settings
from kvxfer.connectors.common.worker_rank import engine_name
from kvxfer.directory import Entry
from kvxfer.errors import UsageError

VERSION: Final = 1
MAX_RANKS: Final = 64
MAX_GROUPS: Final = 64
MAX_READERS: Final = 64

_Model = TypeVar("_Model", bound=BaseModel)


def _token(text: str) -> str:
    try:
        kvxfer.LeaseToken.parse(text)
    except kvxfer.UsageError as error:
        raise ValueError(str(error.args[0])) from None
    return text


_BlockId = Annotated[int, Field(ge=0, lt=2**32)]
_Lease = Annotated[str, AfterValidator(_token)]
_Tokens = Annotated[int, Field(ge=1, le=2**20)]


_EngineId = Annotated[str, Field(min_length=1, max_length=1024)]

#: The writer's version; `require_version` compares it.
Version = Annotated[int, Field(ge=1, lt=2**31)]


class HandoverError(ValueError):
    """A request's parameters cannot be used; the message says which and why."""


def _read_rank(document: Any) -> Entry:
    try:
        rank = Entry.from_dict(document)
        place_of(rank)
    except UsageError as error:
        raise ValueError(error.args[0]) from None
    return rank


#: The agent of one rank: its identity and address.
Rank = Annotated[Entry, PlainValidator(_read_rank)]


class _Own(BaseModel):
    """The parameters under ``kvxfer``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: Version
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=MAX_RANKS)]
    leases: Annotated[tuple[_Lease, ...], Field(min_length=1, max_length=MAX_GROUPS)]
    block_sizes: Annotated[tuple[_Tokens, ...], Field(max_length=MAX_GROUPS)]
    pages_per_block: Annotated[tuple[_Tokens, ...], Field(max_length=MAX_GROUPS)]
    num_tokens: Annotated[int, Field(ge=1, le=2**31)]
    prompt: Annotated[str, Field(max_length=64)]
    keep_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    batch: Annotated[str, Field(max_length=1024)] | None = None


class _Named(BaseModel):
    """The parameters that identify a request at the other engine."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    remote_request_id: Annotated[str, Field(min_length=1, max_length=1024)]
    kvxfer: _Own


class _Passed(_Named):
    """The fields that are read from ``kv_transfer_params``."""

    remote_block_ids: tuple[tuple[_BlockId, ...], ...]


class _Asked(BaseModel):
    """The parameters under ``kvxfer`` for a prompt that is to be pulled."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: Version
    reader: _EngineId | None = None
    readers: Annotated[tuple[_EngineId, ...], Field(max_length=MAX_READERS)] = ()


@dataclass(frozen=True, slots=True)
class Handover:
    """A finished request at another engine.

    Attributes
    ----------
    request_id
        The request's name at the engine that keeps it.
    ranks
        That engine's agents, one for each rank.
    leases
        Tokens, one for each cache group; a reader presents them to read the group's blocks.
    tables
        For each cache group the blocks of its tokens, in their order; 0 for none.
    block_sizes, pages_per_block
        Tokens of a block, and pages of the ranks' regions in it, for each group.
    num_tokens
        The tokens that prefill computes of the prompt. In a return, the tokens that decode has computed.
    comes_back
        Whether this is a return, from decode to the prefill of a later turn.
    keep_s
        How long the blocks are kept without a claim from the reader's engine; None if the engine that keeps
        them does not know heartbeats.
    batch
        `EngineRequest.batch` of the request at the engine that keeps it; further prompts are pushed by it.
    may_be_shared
        Whether other engines may read the request too, unknown to the engine that keeps it.
    """

    request_id: str
    ranks: tuple[Entry, ...]
    leases: tuple[kvxfer.LeaseToken, ...]
    tables: tuple[tuple[int, ...], ...]
    block_sizes: tuple[int, ...]
    pages_per_block: tuple[int, ...]
    num_tokens: int
    comes_back: bool = False
    keep_s: float | None = None
    batch: str | None = None
    may_be_shared: bool = False

    def params(self, engine_id: str, request: EngineRequest) -> dict[str, Any]:
        """Returns the ``kv_transfer_params`` of a response, for a router to pass on.

        The router sends them to a decode engine, or in a return to the next turn's prefill engine.
        """
        return {
            "do_remote_prefill": not self.comes_back,
            "do_remote_decode": self.comes_back,
            "remote_num_tokens": self.num_tokens if self.comes_back else 0,
            "remote_engine_id": engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": [list(table) for table in self.tables],
            "remote_host": place_of(self.ranks[0]).host,
            "remote_port": place_of(self.ranks[0]).port,
            "tp_size": len(self.ranks),
            "kvxfer": {
                "version": VERSION,
                "ranks": [rank.to_dict() for rank in self.ranks],
                "leases": [str(lease) for lease in self.leases],
                "block_sizes": list(self.block_sizes),
                "pages_per_block": list(self.pages_per_block),
                "num_tokens": self.num_tokens,
                "prompt": prompt_digest(request, self.num_tokens),
                "keep_s": self.keep_s,
                "batch": self.batch,
            },
        }

    @classmethod
    def read(
        cls,
        params: dict[str, Any],
        request: EngineRequest,
        num_groups: int,
        settings: Settings,
        num_held_back: int = 0,
    ) -> Handover:
        """Reads the parameters of a request that arrived at the engine that is to continue it.

        Prefill omits the last `num_held_back` tokens of the request's prompt.

        Raises
        ------
        HandoverError
            Missing or absurd fields, another version, a host that may not be dialled, or parameters of
            another prompt. At decode they must cover all tokens that prefill computes; at the prefill of
            a later turn, some tokens at the beginning of its prompt.
        """
        _require_bounded(params.get("remote_block_ids"), request.num_prompt_tokens, num_groups)
        passed = parsed(_Passed, params)
        own = passed.kvxfer
        require_version(own.version)
        for what in ("leases", "block_sizes", "pages_per_block"):
            if (given := len(getattr(own, what))) != num_groups:
                raise HandoverError(_of_other_groups(what, given, num_groups))
        comes_back = is_return(params)
        num_prefilled = request.num_prompt_tokens - num_held_back
        is_part = comes_back and own.num_tokens < num_prefilled
        if not (is_part or own.num_tokens == num_prefilled) or own.prompt != prompt_digest(
            request, own.num_tokens
        ):
            raise HandoverError(
                f"kv_transfer_params are of another prompt ({own.num_tokens} tokens, this one has "
                f"{num_prefilled} for prefill): the router must send both engines the same request"
            )
        for table, block_size, pages in zip(
            passed.remote_block_ids, own.block_sizes, own.pages_per_block, strict=True
        ):
            if len(table) != -(-own.num_tokens // block_size):
                raise HandoverError(
                    f"{len(table)} blocks of {block_size} tokens do not match the prompt's "
                    f"{own.num_tokens} tokens"
                )
            if block_size % pages:
                raise HandoverError(
                    f"a block of {block_size} tokens does not divide into {pages} equal pages"
                )
        require_allowed(own.ranks, settings)
        return cls(
            passed.remote_request_id,
            own.ranks,
            _tokens(own),
            passed.remote_block_ids,
            own.block_sizes,
            own.pages_per_block,
            own.num_tokens,
            comes_back,
            own.keep_s,
            own.batch,
        )


def unwanted(params: dict[str, Any], settings: Settings) -> Handover:
    """Reads the fields needed to tell the other engine that its blocks of a request are not wanted.

    It does not check the prompt: an engine that refuses a request early never gives the connector its prompt.

    Raises
    ------
    HandoverError
        Missing or absurd fields, another version, a host that may not be dialled.
    """
    named = parsed(_Named, params)
    own = named.kvxfer
    require_version(own.version)
    require_allowed(own.ranks, settings)
    return Handover(
        named.remote_request_id, own.ranks, _tokens(own), (), (), (), own.num_tokens, batch=own.batch
    )


def readers_of(params: dict[str, Any]) -> tuple[str, ...]:
    """Returns the engines that the router names as readers of a prompt; empty if it names none.

    Raises
    ------
    HandoverError
        Absurd fields, or another version.
    """
    if params.get("kvxfer") is None:
        return ()
    own = parsed(_Asked, params["kvxfer"])
    require_version(own.version)
    named = (own.reader, *own.readers) if own.reader is not None else own.readers
    return tuple(dict.fromkeys(map(engine_name, named)))


def _tokens(own: _Own) -> tuple[kvxfer.LeaseToken, ...]:
    return tuple(kvxfer.LeaseToken.parse(lease) for lease in own.leases)


def is_return(params: dict[str, Any]) -> bool:
    """Whether the parameters are a return: for prefill, naming tokens that decode holds."""
    asked = params.get("do_remote_decode") and not params.get("do_remote_prefill")
    return bool(asked and params.get("remote_block_ids"))


def prompt_digest(request: EngineRequest, num_tokens: int) -> str:
    """Returns a digest, 32 hexadecimal digits, of all that determines a cache: first tokens, media, adapter.

    It detects a router that mixes up two requests before one reads the other's cache.
    Prompts of embeddings have no digest and are not handed over.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(array("q", request.tokens[:num_tokens]).tobytes())
    digest.update(request.beside_tokens(num_tokens))
    return digest.hexdigest()


def params_of(request: EngineRequest) -> dict[str, Any]:
    """Returns the parameters that came with a request; empty if none came, or something that is no object."""
    params: object = request.params
    return params if isinstance(params, dict) else {}


def parsed(model: type[_Model], document: Any) -> _Model:
    """Returns parameters as one of our models.

    Raises
    ------
    HandoverError
        Names the first fields that are wrong, and why.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        shown = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in found[:3])
        raise HandoverError(f"kv_transfer_params cannot be read: {shown}") from None


def require_version(version: int) -> None:
    """Refuses parameters of another version than this engine's."""
    if version != VERSION:
        raise HandoverError(
            f"kv_transfer_params are of version {version}, this engine reads {VERSION}: "
            "run one release of kvxfer on both engines"
        )


def place_of(rank: Entry) -> Address:
    """Returns the host and port of a rank's agent."""
    return Address.parse(rank.address, "an agent's address")


def require_allowed(ranks: tuple[Entry, ...], settings: Settings) -> None:
    """Refuses hosts that this engine may not dial (``allowed_hosts``)."""
    for rank in ranks:
        host = place_of(rank).host
        if not settings.may_dial(host):
            raise HandoverError(
                f"host {host} is not among this engine's allowed_hosts "
                f"({AllowedHosts(settings.allowed_hosts)}): name it there if prefill "
                "runs on it"
            )


def _require_bounded(tables: Any, num_tokens: int, num_groups: int) -> None:
    """Refuses tables that are too long for this request, before their elements are checked."""
    if not isinstance(tables, list | tuple):
        raise HandoverError("kv_transfer_params name no remote_block_ids: was the request prefilled?")
    if len(tables) != num_groups:
        raise HandoverError(_of_other_groups("remote_block_ids", len(tables), num_groups))
    for table in tables:
        if not isinstance(table, list | tuple) or len(table) > num_tokens:
            raise HandoverError(
                f"a table of remote_block_ids is not a list of at most {num_tokens} blocks, one for "
                "each token"
            )


def _of_other_groups(what: str, given: int, num_groups: int) -> str:
    return (
        f"{what} name {given} cache groups, this engine has {num_groups}: both engines must run the same "
        "model with the same kind of cache manager"
    )
