"""The page pool as /v1 offers it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.control import schema
from kvxfer.control.agents.agent_view import AgentView
from kvxfer.control.agents.dial_check import require_allowed
from kvxfer.control.host_pool.file_tier import FileTier
from kvxfer.control.host_pool.page import PageKey, Salt
from kvxfer.control.host_pool.page_leases import PageLease
from kvxfer.control.host_pool.page_pool import PagePool
from kvxfer.control.own.own_agent import RemoteRegion
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.store import Store
from kvxfer.control.transfers.tenant_gate import TenantGate
from kvxfer.errors import UsageError
from kvxfer.lease_token import LeaseToken

# What is pinned is read from files first.
_PIN_S: Final = 30.0


# The cursor of a list that goes on with what is in files: a segment, and a slot in it.
_PLACE: Final = re.compile(r"files-(\d{1,9})-(\d{1,9})")
_IN_FILES: Final = {"state": "parked", "tier": "files", "pinned": False, "holds": 0, "fetches": 0}


class PageDesk:
    """Parks, fetches, leases, pins, drops and lists pages."""

    def __init__(
        self, pool: PagePool, store: Store, allowed: AllowedHosts, gate: TenantGate, agents: AgentView
    ) -> None:
        self._pool = pool
        self._store = store
        self._allowed = allowed
        self._gate = gate
        self._agents = agents
        self._tenant_of_lease: dict[int, str] = {}

    async def park(self, asked: schema.ParkRequest) -> schema.PagesDone:
        """Copies blocks into the pool; when this returns, the pages are there."""
        if len(set(asked.keys)) != len(asked.keys):
            raise Refusal("conflict", "a key is named twice")
        known = self._agents.blocks_nbytes(asked.agent, asked.region, len(asked.blocks))
        left_s = await self._gate.enter(asked.tenant, known, asked.timeout_s)
        parked = await self._pool.park(
            Salt(asked.tenant, asked.model, asked.revision),
            self._place(asked.agent, asked.region),
            asked.blocks,
            asked.keys,
            lease=_token(asked.lease),
            pin=asked.pin,
            durable=asked.acknowledge == "durable",
            timeout_s=left_s,
            context=asked.context,
        )
        new = {key.key for key in parked.new}
        layout = (parked.new or parked.present)[0].layout
        pages = [
            schema.PageAnswer(key=key, state="parked" if key in new else "present") for key in asked.keys
        ]
        nbytes = self._nbytes(parked.new)
        if not known:  # the agent is not attached here
            self._gate.spend(asked.tenant, nbytes)
        return schema.PagesDone(layout=layout, pages=pages, nbytes=nbytes)

    async def fetch(self, asked: schema.FetchRequest) -> schema.PagesDone:
        """Writes pages into an agent's region: all of them, or none if one is missing."""
        keys = _keys(asked)
        await self._pool.load(keys, asked.timeout_s, asked.worth_s)
        missing = [key for key, page in zip(keys, self._pool.find(keys), strict=True) if page is None]
        if missing:
            answers = await self._missing(missing)
            gone = sum(answer.state == "gone" for answer in answers)
            raise Refusal(
                "gone" if gone else "not-found",
                f"{len(missing)} of {len(keys)} pages are not parked ({gone} were before the restart); "
                f"the first is {missing[0].key!r}",
            )
        left_s = await self._gate.enter(asked.tenant, self._nbytes(keys), asked.timeout_s)
        nbytes = await self._pool.push(
            keys,
            self._place(asked.agent, asked.region),
            asked.blocks,
            lease=_token(asked.lease),
            notify=asked.notify.encode(),
            timeout_s=left_s,
            context=asked.context,
        )
        pages = [schema.PageAnswer(key=key.key, state="done") for key in keys]
        return schema.PagesDone(layout=asked.layout, pages=pages, nbytes=nbytes)

    async def lease(self, asked: schema.PageLeaseRequest) -> schema.PageLease:
        """Grants a right to read the pages that are there."""
        keys = _keys(asked)
        await self._pool.load(keys, asked.timeout_s, asked.worth_s)
        leased = self._pool.lease(keys, asked.holder, asked.ttl_s)
        if leased.parts:
            self._tenant_of_lease[leased.number] = asked.tenant
            self._forget_ended()
        return await self._shown(leased, asked.ttl_s)

    async def extend(self, lease_id: str, ttl_s: float, tenants: frozenset[str] | None) -> schema.LeaseEnded:
        """Begins a lease's time anew."""
        self._pool.extend(self._number(lease_id, tenants), ttl_s)
        return schema.LeaseEnded(id=lease_id, state="active")

    async def revoke(self, lease_id: str, tenants: frozenset[str] | None) -> schema.LeaseEnded:
        """Ends a lease; when this returns, nothing reads under it any more."""
        await self._pool.revoke(self._number(lease_id, tenants))
        return schema.LeaseEnded(id=lease_id, state="revoked")

    async def pin(self, asked: schema.PagesRequest, *, pinned: bool) -> schema.PagesDone:
        """Protects pages from eviction, or ends that protection."""
        keys = _keys(asked)
        if pinned:
            await self._pool.load(keys, _PIN_S)
        return await self._done(asked, keys, self._pool.pin(keys, pinned))

    async def drop(self, asked: schema.PagesRequest) -> schema.PagesDone:
        """Takes pages away."""
        keys = _keys(asked)
        return await self._done(asked, keys, await self._pool.drop(keys))

    async def listed(
        self, tenants: frozenset[str] | None, tenant: str | None, cursor: str, limit: int
    ) -> schema.Listed[schema.Page]:
        """Returns pages in the order of their parking, and then those that are in files alone."""
        if tenant is None and tenants is not None:
            tenant = min(tenants)  # one tenant at a time: a token names few
            if len(tenants) > 1:
                raise Refusal("conflict", f"this token has several tenants: name one of {sorted(tenants)}")
        if tenant is not None and tenants is not None and tenant not in tenants:
            return schema.Listed[schema.Page](items=[])
        if (place := _PLACE.fullmatch(cursor)) is not None and self._pool.files is not None:
            in_files = await self._pool.files.pages(tenant, (int(place[1]), int(place[2])), limit)
            found = self._pool.find(page.key for page in in_files)
            items = [
                schema.Page.model_validate({**page.key._asdict(), "nbytes": page.nbytes, **_IN_FILES})
                for page, in_memory in zip(in_files, found, strict=True)
                if in_memory is None
            ]
            next_ = _cursor(*in_files[-1].place) if len(in_files) == limit else None
        else:
            after = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) < 19 else 0
            pages = self._pool.pages(tenant, after, limit)
            items = [schema.Page.model_validate(page.document()) for page in pages]
            next_ = str(pages[-1].serial) if len(pages) == limit else None
            if next_ is None and self._pool.files is not None:
                next_ = _cursor(0, -1)
        return schema.Listed[schema.Page].model_construct(items=items, next=next_)

    def pools(self, tenants: frozenset[str] | None) -> Sequence[schema.Pool]:
        """Returns the pool and its figures; shows only the tenants that the caller may see."""
        stats = self._pool.stats()
        index = stats.pages
        shown = schema.Pool(
            name="host",
            page_kind=stats.page_kind,
            nbytes=index.nbytes,
            used_nbytes=index.used_nbytes,
            pinned_nbytes=index.pinned_nbytes,
            pages=index.num_pages,
            held=index.num_held,
            leases=stats.num_leases,
            parking=stats.num_parking,
            tenants_nbytes={
                tenant: nbytes
                for tenant, nbytes in self._pool.index.tenants_nbytes().items()
                if tenants is None or tenant in tenants
            },
            parked_total=index.num_parked,
            hits_total=index.num_hits,
            misses_total=index.num_misses,
            evicted_total=index.num_evicted,
            dropped_total=index.num_dropped,
        )
        return [shown] if (files := self._pool.files) is None else [shown, _shown_files(files, tenants)]

    def set_quotas(self, before: Iterable[str], quotas_nbytes: Mapping[str, int]) -> None:
        """Bounds what each named tenant may park; removes the bound of others that are in `before`."""
        for tenant in before:
            if tenant not in quotas_nbytes:
                self._pool.index.set_quota(tenant, None)
        for tenant, nbytes in quotas_nbytes.items():
            self._pool.index.set_quota(tenant, nbytes)

    # ---- inside ------------------------------------------------------------------------------------

    def _place(self, agent: str, region: str) -> RemoteRegion:
        require_allowed(self._allowed, agent)
        return RemoteRegion("", region, agent) if "://" in agent else RemoteRegion(agent, region)

    def _nbytes(self, keys: Iterable[PageKey]) -> int:
        return sum(page.nbytes for page in self._pool.find(keys) if page is not None)

    def _number(self, lease_id: str, tenants: frozenset[str] | None) -> int:
        number = int(lease_id) if lease_id.isascii() and lease_id.isdigit() and len(lease_id) < 19 else 0
        tenant = self._tenant_of_lease.get(number)
        if number not in self._pool.leases or (tenants is not None and tenant not in tenants):
            raise Refusal("not-found", f"there is no lease {lease_id!r} of pages (any more)")
        return number

    def _forget_ended(self) -> None:
        if len(self._tenant_of_lease) > 2 * len(self._pool.leases) + 64:
            self._tenant_of_lease = {
                number: tenant
                for number, tenant in self._tenant_of_lease.items()
                if number in self._pool.leases
            }

    async def _missing(self, keys: Sequence[PageKey]) -> list[schema.PageAnswer]:
        gone = await self._store.find_gone([key.digest() for key in keys])
        return [
            schema.PageAnswer(key=key.key, state="gone" if key.digest() in gone else "missing")
            for key in keys
        ]

    async def _done(
        self, asked: schema.PagesRequest, keys: Sequence[PageKey], there: Iterable[PageKey]
    ) -> schema.PagesDone:
        found = set(there)
        missing = {
            answer.key: answer for answer in await self._missing([key for key in keys if key not in found])
        }
        pages = [missing.get(key.key) or schema.PageAnswer(key=key.key, state="done") for key in keys]
        return schema.PagesDone(layout=asked.layout, pages=pages)

    async def _shown(self, leased: PageLease, ttl_s: float) -> schema.PageLease:
        parts = [
            schema.LeasedPart(
                region=json.loads(part.region.to_bytes()),
                keys=[key.key for key in part.keys],
                blocks=part.blocks,
                token=str(part.token),
            )
            for part in leased.parts
        ]
        missing = await self._missing(leased.missing)
        return schema.PageLease(id=str(leased.number), seconds_left=ttl_s, parts=parts, missing=missing)


def _shown_files(files: FileTier, tenants: frozenset[str] | None) -> schema.Pool:
    """Returns the figures of the tier in files."""
    figures = files.figures()
    return schema.Pool(
        name="files",
        page_kind="files",
        state=figures["state"],
        why=figures["why"],
        nbytes=figures["nbytes"],
        used_nbytes=figures["used_nbytes"],
        pinned_nbytes=0,
        pages=figures["pages"],
        held=0,
        leases=0,
        parking=figures["running"] + figures["waiting"],
        tenants_nbytes={
            tenant: nbytes
            for tenant, nbytes in files.tenants_nbytes().items()
            if tenants is None or tenant in tenants
        },
        parked_total=figures["written_total"],
        hits_total=figures["hits_total"],
        misses_total=figures["misses_total"],
        evicted_total=figures["evicted_total"],
        dropped_total=figures["dropped_total"],
        read_p50_s=figures["read_p50_s"],
        read_p99_s=figures["read_p99_s"],
        faults_total={
            name: figures[f"{name.replace('-', '_')}_total"]
            for name in ("damaged", "read-errors", "write-errors", "no-room", "busy", "out")
        },
    )


def _cursor(segment: int, slot: int) -> str:
    """Returns the cursor that begins behind a place."""
    return f"files-{segment}-{slot + 1}"


def _token(text: str | None) -> LeaseToken | None:
    if text is None:
        return None
    try:
        return LeaseToken.parse(text)
    except UsageError as error:
        raise Refusal("not-permitted", str(error)) from None


def _keys(asked: schema.PagesRequest) -> list[PageKey]:
    keys = [PageKey(asked.tenant, asked.model, asked.revision, asked.layout, key) for key in asked.keys]
    if len(set(keys)) != len(keys):
        raise Refusal("conflict", "a key is named twice")
    return keys
