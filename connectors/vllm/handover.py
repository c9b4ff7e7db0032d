"""What a prefill engine tells a decode engine of a finished request, by way of a router.

The field names around ``kvxfer`` are those that routers already pass and look at; all that this
connector needs is under ``kvxfer``. A decode engine believes none of it: `Handover.read` checks what
can be checked without a connection, the prefill's agents check the rest by their leases.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvxfer.connectors.vllm.settings import Settings

VERSION: Final = 1
_MAX_RANKS: Final = 1024
_MAX_GROUPS: Final = 64
_MAX_BLOCKS: Final = 4_194_304  # native/core/wire.h: kMaxBlocks

_BlockId = Annotated[int, Field(ge=0, lt=2**32)]
_Lease = Annotated[str, Field(pattern=r"^[0-9a-f]{1,16}$")]
_Tokens = Annotated[int, Field(ge=1, le=2**20)]


class HandoverError(ValueError):
    """A request's parameters cannot be used; the message says which and why."""


class Rank(BaseModel):
    """Where one prefill rank's agent is."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=128)]
    address: Annotated[str, Field(max_length=300)]

    @property
    def host(self) -> str:
        """What `address` dials."""
        return urlsplit(self.address).hostname or ""


class _Own(BaseModel):
    """The part under ``kvxfer``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: int
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=_MAX_RANKS)]
    leases: Annotated[tuple[_Lease, ...], Field(min_length=1, max_length=_MAX_GROUPS)]
    block_sizes: Annotated[tuple[_Tokens, ...], Field(max_length=_MAX_GROUPS)]
    pages_per_block: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(max_length=_MAX_GROUPS)
    ]
    num_tokens: Annotated[int, Field(ge=1, le=2**31)]
    prompt: Annotated[str, Field(max_length=64)]


class _Passed(BaseModel):
    """All that is read of ``kv_transfer_params``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    remote_request_id: Annotated[str, Field(min_length=1, max_length=1024)]
    remote_block_ids: Annotated[
        tuple[Annotated[tuple[_BlockId, ...], Field(max_length=_MAX_BLOCKS)], ...],
        Field(max_length=_MAX_GROUPS),
    ]
    kvxfer: _Own


class Handover:
    """A finished request at a prefill engine.

    Attributes
    ----------
    request_id
        The prefill engine's.
    ranks
        Its agents, one for each rank.
    leases
        One for each cache group: whoever names it may read the group's blocks.
    tables
        For each cache group the blocks of the prompt, in its order; 0 for none.
    block_sizes, pages_per_block
        Tokens of a block, and pages of the ranks' regions in it, for each group.
    num_tokens
        Of the prompt, all of them computed.
    """

    __slots__ = ("block_sizes", "leases", "num_tokens", "pages_per_block", "ranks", "request_id", "tables")

    def __init__(
        self,
        request_id: str,
        ranks: tuple[Rank, ...],
        leases: tuple[int, ...],
        tables: tuple[tuple[int, ...], ...],
        block_sizes: tuple[int, ...],
        pages_per_block: tuple[int, ...],
        num_tokens: int,
    ) -> None:
        self.request_id = request_id
        self.ranks = ranks
        self.leases = leases
        self.tables = tables
        self.block_sizes = block_sizes
        self.pages_per_block = pages_per_block
        self.num_tokens = num_tokens

    def params(self, engine_id: str, prompt: str) -> dict[str, Any]:
        """Returns the ``kv_transfer_params`` of the prefill's response, for a router to hand on."""
        first = urlsplit(self.ranks[0].address)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": [list(table) for table in self.tables],
            "remote_host": first.hostname,
            "remote_port": first.port,
            "tp_size": len(self.ranks),
            "kvxfer": {
                "version": VERSION,
                "ranks": [rank.model_dump() for rank in self.ranks],
                # Hexadecimal: routers in other languages round large numbers of JSON.
                "leases": [f"{lease:x}" for lease in self.leases],
                "block_sizes": list(self.block_sizes),
                "pages_per_block": list(self.pages_per_block),
                "num_tokens": self.num_tokens,
                "prompt": prompt,
            },
        }

    @classmethod
    def read(cls, params: dict[str, Any], request: Any, num_groups: int, settings: Settings) -> Handover:
        """Reads the parameters of a request that arrived at a decode engine.

        Raises
        ------
        HandoverError
            Missing or absurd fields, another version, a host that may not be dialled, parameters
            of another prompt.
        """
        try:
            passed = _Passed.model_validate(params)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            shown = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in found[:3])
            raise HandoverError(f"kv_transfer_params cannot be read: {shown}") from None
        own = passed.kvxfer
        if own.version != VERSION:
            raise HandoverError(
                f"kv_transfer_params are of version {own.version}, this engine reads {VERSION}: "
                "run one release of kvxfer on both engines"
            )
        for what, given in (
            ("remote_block_ids", passed.remote_block_ids),
            ("leases", own.leases),
            ("block_sizes", own.block_sizes),
            ("pages_per_block", own.pages_per_block),
        ):
            if len(given) != num_groups:
                raise HandoverError(
                    f"{what} name {len(given)} cache groups, this engine has {num_groups}: both engines "
                    "run one model with one kind of cache manager"
                )
        if own.num_tokens != request.num_prompt_tokens or own.prompt != prompt_digest(request):
            raise HandoverError(
                f"kv_transfer_params are of another prompt ({own.num_tokens} tokens, this one has "
                f"{request.num_prompt_tokens}): the router must send both engines the same request"
            )
        for table, block_size in zip(passed.remote_block_ids, own.block_sizes, strict=True):
            if len(table) != -(-own.num_tokens // block_size):
                raise HandoverError(
                    f"{len(table)} blocks of {block_size} tokens do not hold the prompt's {own.num_tokens}"
                )
        for rank in own.ranks:
            if urlsplit(rank.address).scheme != "tcp" or not rank.host:
                raise HandoverError(f"rank {rank.name!r} is at {rank.address!r}, not at tcp://host:port")
            if not settings.may_dial(rank.host):
                raise HandoverError(
                    f"host {rank.host} is not among this engine's allowed_hosts "
                    f"({', '.join(settings.allowed_hosts or ())})"
                )
        return cls(
            passed.remote_request_id,
            own.ranks,
            tuple(int(lease, 16) for lease in own.leases),
            passed.remote_block_ids,
            own.block_sizes,
            own.pages_per_block,
            own.num_tokens,
        )


def prompt_digest(request: Any) -> str:
    """Returns 32 hexadecimal digits of all that decides a prompt's cache: tokens, media, adapter.

    With it a router that mixes up two requests is found out before one reads the other's cache.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(request.prompt_token_ids).encode())
    digest.update(repr([feature.identifier for feature in request.mm_features or ()]).encode())
    lora = request.lora_request
    digest.update(repr(None if lora is None else lora.lora_name).encode())
    return digest.hexdigest()
