"""The user's settings, read from the environment: `KvCacheConnectorConfig` has no field for them."""

from __future__ import annotations

import logging
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvxfer.address import Address
from kvxfer.connectors.common.settings import Settings, given_in
from kvxfer.errors import UsageError

#: The variable in every rank's environment: a JSON object.
VARIABLE: Final = "KVXFER_TRTLLM"

#: The connectors' shared settings that this connector uses.
NAMES: Final = (
    "host",
    "port",
    "advertise",
    "secret_file",
    "allowed_hosts",
    "lease_ttl_s",
    "claim_within_s",
    "keep_share",
    "load_timeout_s",
    "connect_timeout_s",
    "silent_timeout_s",
    "linger_s",
    "transports",
    "huge_pages",
    "model",
)


class ExecutorSettings(BaseModel):
    """The settings specific to this engine; `shared` has those of all connectors.

    Attributes
    ----------
    role
        ``"prefill"`` keeps every prompt for an engine that asks for it. ``"decode"`` asks for every prompt.
        ``"both"`` asks, and keeps the prompts that it had to compute.
    engine_id
        The engine's id, the same on all of its ranks; with "" rank 0 draws one.
    prefills
        The prefill engines that decode asks, by address (their `host` and `port`), in this order.
    lookup_timeout_s
        How long each of these may take to answer. The engine's loop waits meanwhile.
    failed_loads
        What happens to a request whose promised cache did not arrive. ``"recompute"``: the ranks compute it,
        after a position in the engine's own request is set back. ``"stop"``: the engine's loop ends.
    kv_heads
        The model's KV heads, if its one pool holds pages [head, token, dim] as the engine's own attention
        does. Then the other engine's tensor parallelism may differ. 0: pages are moved as they are.
    log_level
        The least level that the logger ``kvxfer`` writes to stderr: the engine's ranks configure no logging.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["prefill", "decode", "both"] = "both"
    engine_id: Annotated[str, Field(max_length=1024)] = ""
    prefills: tuple[str, ...] = ()
    lookup_timeout_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 0.25
    failed_loads: Literal["recompute", "stop"] = "recompute"
    kv_heads: Annotated[int, Field(ge=0, le=2**16)] = 0
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "WARNING"
    shared: Settings = Settings()

    @property
    def produces(self) -> bool:
        """Whether this engine keeps prompts."""
        return self.role != "decode"

    @property
    def consumes(self) -> bool:
        """Whether this engine asks for prompts."""
        return self.role != "prefill"

    def begin_log(self) -> None:
        """Makes this process log from `log_level` on."""
        logger = logging.getLogger("kvxfer")
        if self.log_level != "WARNING" and not logger.handlers:
            logger.addHandler(logging.StreamHandler())
            logger.setLevel(self.log_level)

    @field_validator("prefills")
    @classmethod
    def _are_addresses(cls, prefills: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(str(Address.parse(each, "prefills")) for each in prefills)
        except UsageError as error:
            raise ValueError(error.args[0]) from None

    @model_validator(mode="after")
    def _agrees(self) -> ExecutorSettings:
        if self.role == "decode" and not self.prefills:
            raise ValueError(
                'role "decode" needs engines to ask: name them in prefills, e.g. ["tcp://10.0.0.7:7301"]'
            )
        if self.role == "prefill" and self.prefills:
            raise ValueError(
                'role "prefill" does not ask other engines: leave out prefills, or use role "both"'
            )
        for address in self.prefills:
            if not self.shared.may_dial(host := Address.parse(address, "prefills").host):
                raise ValueError(f"prefills names {host}, which is not among allowed_hosts")
        return self


def settings_of_environment() -> ExecutorSettings:
    """Returns the settings from the environment.

    Raises
    ------
    ValueError
        The variable is no JSON object, or a setting is unknown or out of range.
    """
    own = [name for name in ExecutorSettings.model_fields if name != "shared"]
    given = given_in(VARIABLE, (*own, *NAMES), '{"role": "prefill"}')
    shared = Settings.of({name: given[name] for name in given if name in NAMES}, VARIABLE)
    try:
        return ExecutorSettings(**{name: given[name] for name in given if name in own}, shared=shared)
    except ValidationError as error:
        found = "; ".join(
            ": ".join([*map(str, each["loc"]), each["msg"]]) for each in error.errors(include_url=False)
        )
        raise ValueError(f"{VARIABLE}: {found}") from None
