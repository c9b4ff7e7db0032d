"""What an engine tells the one that goes on with a finished request, by way of a router.

Mostly prefill tells decode; where a later turn follows, decode tells the prefill engine of that turn.

The field names around ``kvxfer`` are those that routers already pass and look at; all that this
connector needs is under ``kvxfer``. A decode engine believes none of it: `Handover.read` checks what
can be checked without a connection, the prefill's agents check the rest by their leases.
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
from kvxfer.connectors.common.place import engine_name
from kvxfer.connectors.common.settings import Settings
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


class HandoverError(ValueError):
    """A request's parameters cannot be used; the message says which and why."""


def _read_rank(document: Any) -> Entry:
    try:
        rank = Entry.from_dict(document)
        place_of(rank)
    except UsageError as error:
        raise ValueError(error.args[0]) from None
    return rank


#: The agent of one rank: who it is, and where.
Rank = Annotated[Entry, PlainValidator(_read_rank)]


class _Own(BaseModel):
    """The part under ``kvxfer``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=MAX_RANKS)]
    leases: Annotated[tuple[_Lease, ...], Field(min_length=1, max_length=MAX_GROUPS)]
    block_sizes: Annotated[tuple[_Tokens, ...], Field(max_length=MAX_GROUPS)]
    pages_per_block: Annotated[tuple[_Tokens, ...], Field(max_length=MAX_GROUPS)]
    num_tokens: Annotated[int, Field(ge=1, le=2**31)]
    prompt: Annotated[str, Field(max_length=64)]
    keep_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    batch: Annotated[str, Field(max_length=1024)] | None = None


class _Named(BaseModel):
    """What names a request at the other engine."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    remote_request_id: Annotated[str, Field(min_length=1, max_length=1024)]
    kvxfer: _Own


class _Passed(_Named):
    """All that is read of ``kv_transfer_params``."""

    remote_block_ids: tuple[tuple[_BlockId, ...], ...]


class _Asked(BaseModel):
    """The part under ``kvxfer`` of a prompt that is to be pulled."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int
    reader: _EngineId | None = None
    readers: Annotated[tuple[_EngineId, ...], Field(max_length=MAX_READERS)] = ()


@dataclass(frozen=True, slots=True)
class Handover:
    """A finished request at another engine.

    Attributes
    ----------
    request_id
        That engine's.
    ranks
        Its agents, one for each rank.
    leases
        Tokens, one for each cache group, by which the group's blocks are read.
    tables
        For each cache group the blocks of its tokens, in their order; 0 for none.
    block_sizes, pages_per_block
        Tokens of a block, and pages of the ranks' regions in it, for each group.
    num_tokens
        Of the prompt, all that prefill computes; of a request that comes back from decode, what that
        has computed.
    comes_back
        Whether it does.
    keep_s
        How long its blocks are kept without a word of the reader's engine; None where the engine that
        keeps them does not listen for one.
    batch
        `EngineRequest.batch` of its request there: what further prompts of it are pushed by.
    may_be_shared
        Whether other engines may be about to read it, unknown to the one that keeps it.
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
        """Returns the ``kv_transfer_params`` of a response, for a router to hand on.

        They go to a decode engine, or those of a return to the next turn's prefill engine.
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
        """Reads the parameters of a request that arrived at an engine that is to go on with it.

        Prefill does not compute the last `num_held_back` tokens of its prompt.

        Raises
        ------
        HandoverError
            Missing or absurd fields, another version, a host that may not be dialled, parameters
            of another prompt: decode is handed all that prefill computes, the prefill of a later
            turn some tokens that its prompt begins with.
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
                    f"{len(table)} blocks of {block_size} tokens do not hold the prompt's {own.num_tokens}"
                )
            if block_size % pages:
                raise HandoverError(f"a block of {block_size} tokens is not {pages} pages of equal size")
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
    """Reads what it takes to tell the other engine that nobody wants a request's blocks.

    Of no prompt in particular: an engine that refused a request before it looked at it has none.

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
    """Returns which engines will read a prompt that prefill is asked for; none where the router names none.

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
    """Whether a request's parameters are for prefill, and say what decode has of its beginning."""
    asked = params.get("do_remote_decode") and not params.get("do_remote_prefill")
    return bool(asked and params.get("remote_block_ids"))


def prompt_digest(request: EngineRequest, num_tokens: int) -> str:
    """Returns 32 hexadecimal digits of all that decides a cache: the first tokens, media, adapter.

    With it a router that mixes up two requests is found out before one reads the other's cache.
    Embeddings instead of tokens have none: they are not handed over.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(array("q", request.tokens[:num_tokens]).tobytes())
    digest.update(request.beside_tokens(num_tokens))
    return digest.hexdigest()


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
    """Returns the host and port that a rank's agent is dialled at."""
    return Address.parse(rank.address, "an agent's address")


def require_allowed(ranks: tuple[Entry, ...], settings: Settings) -> None:
    """Refuses hosts that this engine's user does not let it dial."""
    for rank in ranks:
        host = place_of(rank).host
        if not settings.may_dial(host):
            raise HandoverError(
                f"host {host} is not among this engine's allowed_hosts "
                f"({AllowedHosts(settings.allowed_hosts)}): name it there if prefill "
                "runs on it"
            )


def _require_bounded(tables: Any, num_tokens: int, num_groups: int) -> None:
    """Refuses what is too long to be this request's, before every element of it is looked at."""
    if not isinstance(tables, list | tuple):
        raise HandoverError("kv_transfer_params name no remote_block_ids: was the request prefilled?")
    if len(tables) != num_groups:
        raise HandoverError(_of_other_groups("remote_block_ids", len(tables), num_groups))
    for table in tables:
        if not isinstance(table, list | tuple) or len(table) > num_tokens:
            raise HandoverError(
                f"remote_block_ids hold a table that is not up to {num_tokens} blocks, one for each token"
            )


def _of_other_groups(what: str, given: int, num_groups: int) -> str:
    return (
        f"{what} name {given} cache groups, this engine has {num_groups}: both engines run one model "
        "with one kind of cache manager"
    )
