"""The user's settings for an engine's connector."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

import kvxfer
from kvxfer.address import Address
from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.connectors.common.worker_rank import WorkerRank

# Environment variable: a pod gets its own address there, so templates need not contain it.
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
        The port of the first worker's agent; the others take the ports that follow. With 0 the system picks
        ports, and each request carries them.
    advertise
        The host that other engines dial. "" means `host`; if that is ``0.0.0.0`` or ``::``, it means this
        host's address on the default route.
    secret_file
        The file with the secret of all engines, or with two secrets, one a line, during a change of secrets.
        It is read again when it changes. None takes ``KVXFER_SECRET_FILE`` or ``KVXFER_SECRET``, or this
        user's own secret.
    allowed_hosts
        Hosts and networks (``"10.0.0.0/8"``) that this engine dials when a request's parameters name
        them; None for addresses of this host and of private networks. ``"*"`` is any host, and
        ``"*.example.org"`` any host whose name ends so.
    lease_ttl_s
        How long prefill keeps the blocks of a finished request for decode to fetch. Each claim from decode
        restarts the time, also while the request waits there for its turn.
    return_ttl_s
        How long decode keeps the blocks of a finished request for the next turn's prefill.
    claim_within_s
        How long an unclaimed kept request is safe. Afterwards it may give way, the oldest first, when
        requests wait for blocks or unclaimed requests exceed one of the two shares below.
    keep_share, return_share
        Shares of the cache's blocks: the most that unclaimed prompts may hold, and the most that unclaimed
        requests decoded here for later turns may hold.
    load_timeout_s, connect_timeout_s
        Deadlines of a request's fetch, once it began, and of connecting to a prefill engine.
    mode
        The mode of a prompt if the router does not choose. ``"pull"``: decode reads it after prefill's
        answer. ``"push"``: the router asks both engines at once, with the same name of the request.
    loads
        ``"asynchronous"``: other requests run while a cache is fetched. ``"synchronous"``: the forward that
        needs the cache waits, layer by layer; for caches of one group without a window.
    linger_s
        The longest that a step waits for caches that it has just begun to fetch, so that their requests
        continue one step sooner. It waits only if the last fetches from the same engine would have come in
        time, and only while the gain exceeds the delay of the running requests. 0 for never.
    push_timeout_s
        How long decode waits for a prompt that is pushed to it, from its registration to the last byte.
    silent_timeout_s
        An engine that was not heard for so long counts as lost, and fetches from it fail.
    require_transfer
        Whether decode refuses a request that names no cache, if it would have to compute the prompt.
        Otherwise it counts and logs such requests. An engine of both roles still computes requests that it
        is to hand over.
    short_prompt_tokens
        Decode computes up to so many tokens of a prompt itself without counting or refusing the request; at
        least a block.
    return_decoded
        Whether decode keeps every finished request for the next turn's prefill; otherwise only requests whose
        parameters also have ``do_remote_decode``. It keeps none whose answer cannot carry parameters.
    transports
        Kinds of rails to use; None for those of `kvxfer.AgentOptions`: all for host memory.
    huge_pages
        Whether a cache on the CPU is laid in huge pages when the engine registers it
        (`kvxfer.use_huge_pages`): up to 2 s for a GiB, once.
    model
        Declared name of the model: engines with different names never exchange a cache. "" derives a name
        from the model's architecture and sizes.
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
                f"{host!r} is not a host: write a name or an address of this host, without brackets and "
                "port, or 0.0.0.0"
            ) from None
        return host

    @field_validator("allowed_hosts")
    @classmethod
    def _readable(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        AllowedHosts(hosts)
        return hosts

    @classmethod
    def of(cls, given: dict[str, Any], where: str) -> Settings:
        """Reads the user's settings; ``KVXFER_HOST`` is the default of `host`. Errors mention `where`.

        Raises
        ------
        ValueError
            A setting is unknown or out of range; the message names all of them.
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

    def agent_options(self, position: WorkerRank) -> kvxfer.AgentOptions:
        """Returns the options of a worker's agent, with the GPU that holds the worker's cache, if any."""
        port = self.port + position.index if self.port else 0
        options: dict[str, Any] = {
            "listen": str(Address(self.host, port)),
            "advertise": str(Address(self.advertise, None)) if self.advertise else None,
            "transfer_timeout_s": self.load_timeout_s,
            "connect_timeout_s": self.connect_timeout_s,
            "handshake_timeout_s": self.connect_timeout_s,
            "silent_timeout_s": self.silent_timeout_s,
        }
        if self.secret_file is not None:
            options["secret"] = self.secret_file  # the agent reads it again when it changes
        if position.gpu is not None:
            options |= {"transports": ("cuda_ipc", *kvxfer.AgentOptions().transports), "gpu": position.gpu}
        if self.transports is not None:
            options["transports"] = self.transports
        return kvxfer.AgentOptions(**options)

    @property
    def waits(self) -> bool:
        """Whether forwards wait for the caches that they load."""
        return self.loads == "synchronous"

    def may_dial(self, host: str) -> bool:
        """Returns whether a request's parameters may send this engine to `host`."""
        return AllowedHosts(self.allowed_hosts).allow(host)


def given_in(variable: str, names: Collection[str], example: str) -> dict[str, Any]:
    """Returns the settings that an environment variable gives as a JSON object; {} if it is not set.

    Raises
    ------
    ValueError
        It is no JSON object, or names a setting that is not among `names`.
    """
    text = os.environ.get(variable, "") or "{}"
    try:
        given: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{variable} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{variable} is {text!r:.100}: write an object, e.g. {example}")
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"{variable}: {', '.join(unknown)} is not a setting (settings: {', '.join(names)})")
    return given
