"""Pages of the host pool, by key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints

from kvxfer.control.schema.base import (
    WHOLE,
    Address,
    Block,
    Context,
    Key,
    LeaseText,
    Name,
    RequestModel,
    ResponseModel,
    Seconds,
    Tenant,
)

if TYPE_CHECKING:
    from kvxfer.lease_token import LeaseToken
    from kvxfer.region_descriptor import RegionDescriptor

Keys = Annotated[list[Key], Field(min_length=1, max_length=4096)]
PageBlocks = Annotated[list[Block], Field(min_length=1, max_length=4096), WHOLE]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


Worth = Annotated[
    Seconds | None,
    Field(
        description="How long computing the pages would take (their tokens by the rate of computing them): "
        "if reading them from files would take longer, nothing is read and `refused` says how long"
    ),
]


class Salt(RequestModel):
    """The salt of a page's key: pages with different salts are different pages."""

    tenant: Tenant = ""
    model: Name
    revision: Context = ""


class ParkRequest(Salt):
    """Copies blocks of an agent's region into the pool, one under each key."""

    keys: Keys
    agent: Address = Field(description="Name or id of an agent that is attached or connected, or an address")
    region: Name
    blocks: PageBlocks
    lease: LeaseText | None = Field(default=None, description="null: the attached agent is asked for one")
    pin: bool = False
    acknowledge: Literal["memory", "durable"] = Field(
        default="memory", description="durable: this answers when the pages would survive a loss of power"
    )
    timeout_s: Seconds = 30.0
    context: Context = ""


class PagesRequest(Salt):
    """Names pages by key; `layout` is the digest that the answer to parking them had."""

    keys: Keys
    layout: Digest


class PageLeaseRequest(PagesRequest):
    """Asks for the right to read pages for a time; the answer has what the reader's `agent.read` needs."""

    holder: Name | None = None
    ttl_s: Seconds = 30.0
    timeout_s: Seconds = Field(default=30.0, description="For reading pages that are in files alone")
    worth_s: Worth = None


class FetchRequest(PagesRequest):
    """Copies pages into blocks of an agent's region."""

    agent: Address = Field(description="Name or id of an agent that is attached or connected, or an address")
    region: Name
    blocks: PageBlocks
    lease: LeaseText | None = Field(default=None, description="Token of a lease to write, if one is used")
    notify: Context = ""
    timeout_s: Seconds = 30.0
    worth_s: Worth = None
    context: Context = ""


class Page(ResponseModel):
    tenant: str
    model: str
    revision: str
    layout: str = Field(description="Digest of the contents of a page of its layout")
    key: str
    state: str
    tier: str = Field(default="memory", description="memory, or files: it is read from there when asked for")
    nbytes: int
    pinned: bool
    holds: int
    fetches: int


class PageAnswer(ResponseModel):
    """The result for one key: ``parked``, ``present``, ``done``, ``missing``, or ``gone``.

    The daemon had acknowledged a ``gone`` page in its last run, and lost it by its restart.
    """

    key: str
    state: str


class PagesDone(ResponseModel):
    layout: str
    pages: list[PageAnswer]
    nbytes: int = 0


class LeasedPart(ResponseModel):
    """Pages of one region: connect to the region's agent, and read `blocks` under `token`."""

    region: dict[str, Any] = Field(description="`RegionDescriptor.to_bytes`, as JSON")
    keys: list[str]
    blocks: list[int]
    token: str

    def descriptor(self) -> RegionDescriptor:
        """Returns the region, for `Agent.connect` and `Agent.read`."""
        from kvxfer.region_descriptor import RegionDescriptor

        return RegionDescriptor.from_bytes(json.dumps(self.region).encode())

    def lease(self) -> LeaseToken:
        """Returns the token, for the ``lease=`` of `Agent.read`."""
        from kvxfer.lease_token import LeaseToken

        return LeaseToken.parse(self.token)


class PageLease(ResponseModel):
    id: str
    seconds_left: float
    parts: list[LeasedPart]
    missing: list[PageAnswer]


class Pool(ResponseModel):
    """A tier of the pool: ``host`` is memory, ``files`` a directory.

    `tenants_nbytes` is each tenant's share, including pages that are being parked. Of files, `parking` is
    what waits for the disk, `parked_total` what was written, and `faults_total` counts faults by reason.
    """

    name: str
    page_kind: str
    state: str = Field(default="up", description="up, read-only or out")
    why: str = ""
    nbytes: int
    used_nbytes: int
    pinned_nbytes: int
    pages: int
    held: int
    leases: int
    parking: int
    tenants_nbytes: dict[str, int]
    parked_total: int
    hits_total: int
    misses_total: int
    evicted_total: int
    dropped_total: int
    read_p50_s: float = 0.0
    read_p99_s: float = 0.0
    faults_total: dict[str, int] = Field(default_factory=dict)
