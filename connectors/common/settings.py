"""What a user sets of an engine's connector."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

import kvxfer
from kvxfer.address import Address
from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.connectors.common.place import Place

# Of the process's environment: a pod learns its own address there, and no template has to write it down.
_HOST: Final = "KVXFER_HOST"

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_Share = Annotated[float, Field(ge=0, le=1)]


class Settings(BaseModel):
    """Settings of one engine's connector; the defaults suit engines on one machine.

    Attributes
    ----------
    host
        Where the engine's agents listen; beyond loopback a secret is needed. `of` takes
        ``KVXFER_HOST`` where it is not given.
    port
        Of the first worker's agent; the others have those that follow. 0 for ports that the system picks,
        which are told with each request.
    advertise
        The host that other engines dial; "" for `host`, and where that is ``0.0.0.0`` or ``::`` for the
        address of this host from which the default route leaves.
    secret_file
        The file that holds the secret of all engines, or two while one is exchanged for another, one a line;
        it is read again where it changes. None takes ``KVXFER_SECRET_FILE`` or ``KVXFER_SECRET``, or this
        user's own secret.
    allowed_hosts
        Hosts and networks (``"10.0.0.0/8"``) that this engine dials when a request's parameters name
        them; None for addresses of this host and of private networks. ``"*"`` is any host, and
        ``"*.example.org"`` any whose name ends so.
    lease_ttl_s
        How long prefill keeps the blocks of a finished request for decode to fetch. It begins anew whenever
        decode says that it knows the request, also one that waits there for its turn.
    return_ttl_s
        How long decode keeps the blocks of a finished request for the next turn's prefill.
    claim_within_s
        How long a kept request that no reader's engine knows of yet is safe. Older ones give way, the
        oldest first, where requests wait for blocks or more is kept than the two settings below say.
    keep_share, return_share
        Of the cache's blocks: how many prompts that decode has not claimed may hold, and how many what
        was decoded here for later turns.
    load_timeout_s, connect_timeout_s
        Deadlines of a request's fetch, once it began, and of connecting to a prefill engine.
    mode
        What becomes of a prompt whose router does not say: ``"pull"``, where decode reads it when prefill has
        told of it; ``"push"``, where decode was asked at once and told the same name of the request.
    loads
        ``"asynchronous"``: other requests go on while a cache is fetched. ``"synchronous"``: the
        forward that needs it waits, layer by layer; for caches of one group without a window.
    linger_s
        How long a step waits at most for caches that it has just begun to fetch: their requests go on one
        step sooner. It waits where the last ones from the same engine came in that time, and no longer
        than it takes from others what it gives to these. 0 for never.
    push_timeout_s
        How long decode waits for a prompt that is pushed to it, from its registration to the last byte.
    silent_timeout_s
        An engine of which nothing was heard for so long is lost, with what is fetched from it.
    require_transfer
        Whether a request that names no cache to fetch is refused at decode, where its prompt would have to be
        computed; else it is counted and spoken of. An engine of both roles still computes what it is to
        hand over.
    short_prompt_tokens
        So many tokens of a prompt decode computes itself without a word; a block at least.
    return_decoded
        Whether decode keeps every finished request for the next turn's prefill to fetch; else only those
        whose parameters say ``do_remote_decode`` as well. None is kept of which its reader cannot learn.
    transports
        Kinds of rails to use; None for those of `kvxfer.AgentOptions`: all for host memory.
    huge_pages
        Whether a cache on the CPU is laid in huge pages when the engine registers it
        (`kvxfer.use_huge_pages`): up to 2 s for a GiB, once.
    model
        Declared name of the model: engines of two names never exchange a cache. "" derives one from
        the model's architecture and sizes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    advertise: str = ""
    secret_file: Path | None = None
    allowed_hosts: tuple[str, ...] | None = None
    lease_ttl_s: _Seconds = 30.0
    return_ttl_s: _Seconds = 120.0
    claim_within_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    keep_share: _Share = 0.9
    return_share: _Share = 0.25
    load_timeout_s: _Seconds = 30.0
    connect_timeout_s: _Seconds = 5.0
    mode: Literal["pull", "push"] = "pull"
    loads: Literal["asynchronous", "synchronous"] = "asynchronous"
    linger_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    push_timeout_s: _Seconds = 120.0
    silent_timeout_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    require_transfer: bool = False
    short_prompt_tokens: Annotated[int, Field(ge=0)] = 0
    return_decoded: bool = False
    transports: tuple[str, ...] | None = None
    huge_pages: bool = True
    model: str = ""

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        try:
            Address.parse(str(Address(host, 0)), "host")
            if ":" in host:
                ipaddress.ip_address(host)
        except (kvxfer.UsageError, ValueError):
            raise ValueError(
                f"{host!r} is no host: write a name or an address of this one, without brackets and port, "
                "or 0.0.0.0"
            ) from None
        return host

    @field_validator("allowed_hosts")
    @classmethod
    def _readable(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        AllowedHosts(hosts)
        return hosts

    @classmethod
    def of(cls, given: dict[str, Any], where: str) -> Settings:
        """Reads what a user gave; `where` it stands, for errors. ``KVXFER_HOST`` stands in for `host`.

        Raises
        ------
        ValueError
            Names every setting that is unknown or out of range.
        """
        host = None if "host" in given else os.environ.get(_HOST)
        try:
            return cls(**given) if host is None else cls(host=host, **given)
        except ValidationError as error:
            names = {} if host is None else {"host": _HOST}
            found = "; ".join(
                f"{names.get(name := '.'.join(map(str, item['loc'])), name)}: {item['msg']}"
                for item in error.errors(include_url=False)
            )
            raise ValueError(f"{where}: {found} (settings: {', '.join(cls.model_fields)})") from None

    def agent_options(self, place: Place) -> kvxfer.AgentOptions:
        """Returns how a worker's agent behaves; where its cache lies on a GPU, with that one."""
        port = self.port + place.index if self.port else 0
        options: dict[str, Any] = {
            "listen": str(Address(self.host, port)),
            "advertise": str(Address(self.advertise, None)) if self.advertise else None,
            "transfer_timeout_s": self.load_timeout_s,
            "connect_timeout_s": self.connect_timeout_s,
            "handshake_timeout_s": self.connect_timeout_s,
            "silent_timeout_s": self.silent_timeout_s,
        }
        if self.secret_file is not None:
            options["secret"] = self.secret_file  # read again where it changes
        if place.gpu is not None:
            options |= {"transports": ("cuda_ipc", *kvxfer.AgentOptions().transports), "gpu": place.gpu}
        if self.transports is not None:
            options["transports"] = self.transports
        return kvxfer.AgentOptions(**options)

    @property
    def waits(self) -> bool:
        """Whether forwards wait for what they load."""
        return self.loads == "synchronous"

    def may_dial(self, host: str) -> bool:
        """Returns whether a request's parameters may send this engine to `host`."""
        return AllowedHosts(self.allowed_hosts).allow(host)
