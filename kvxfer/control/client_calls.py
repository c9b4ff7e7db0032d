"""Every operation of /v1 as a value: what is sent, and what its answer is. Both clients are made of these.

Functions, and the clients' methods, are called as the operations of the OpenAPI document (`operationId`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from kvxfer.control import schema
from kvxfer.control.client_error import ControlError

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Model = TypeVar("Model", bound=BaseModel)

#: Until an answer begins, beyond what a request says itself that it may take.
PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request, and how its answer is read.

    Attributes
    ----------
    also
        Statuses beside those of success that bring an answer.
    timeout_s
        How long the answer may take.
    """

    method: str
    path: str
    read: Callable[[bytes], Answer]
    params: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    also: frozenset[int] = frozenset()
    timeout_s: float = PATIENCE_S
    headers: dict[str, str] = field(default_factory=dict)

    def at(self, cursor: str) -> Call[Answer]:
        """Returns the call for the page of a list that a cursor names."""
        kept = tuple(param for param in self.params if param[0] != "cursor")
        return replace(self, params=(*kept, ("cursor", cursor)))


# ---- the node --------------------------------------------------------------------------------------


def healthz() -> Call[schema.Health]:
    """Answers while the daemon runs."""
    return _get("/healthz", schema.Health)


def readyz() -> Call[schema.Readiness]:
    """Returns whether it takes work, and why not."""
    return replace(_get("/readyz", schema.Readiness), also=frozenset({503}))


def get_node() -> Call[schema.Node]:
    """Returns which daemon this is."""
    return _get("/v1/node", schema.Node)


def get_topology() -> Call[schema.Topology]:
    """Returns the machine, its agents, and who is connected to whom over which rails."""
    return _get("/v1/topology", schema.Topology)


def get_doctor(require: Iterable[str] = ()) -> Call[schema.Doctor]:
    """Returns what ``kvxfer doctor`` finds where the daemon runs; kept for ten seconds."""
    return _get("/v1/doctor", schema.Doctor, require=",".join(require))


def get_metrics() -> Call[str]:
    """Returns figures in Prometheus' text."""
    return Call("GET", "/metrics", lambda body: body.decode())


def get_settings() -> Call[schema.Settings]:
    """Returns what can be changed while the daemon runs."""
    return _get("/v1/settings", schema.Settings)


def change_settings(asked: schema.SettingsChange) -> Call[schema.Settings]:
    """Changes what is named, and nothing else; returns all of them."""
    return _send("PATCH", "/v1/settings", schema.Settings, asked)


def get_drain() -> Call[schema.Drain]:
    """Returns whether the node drains, and is ready to stop."""
    return _get("/v1/drain", schema.Drain)


def begin_drain(deadline_s: float = 300.0) -> Call[schema.Drain]:
    """Refuses new work from now on; what runs goes on, for `deadline_s` at most."""
    return _send("PUT", "/v1/drain", schema.Drain, schema.DrainRequest(deadline_s=float(deadline_s)))


def end_drain() -> Call[schema.Drain]:
    """Takes a drain back."""
    return _send("DELETE", "/v1/drain", schema.Drain)


# ---- agents ----------------------------------------------------------------------------------------


def list_agents(*, cursor: str = "", limit: int = 100) -> Call[schema.Listed[schema.Agent]]:
    """Returns agents that are attached, and the daemon's own."""
    return _get("/v1/agents", schema.Listed[schema.Agent], cursor=cursor, limit=limit)


def get_agent(agent: str) -> Call[schema.AgentDetail]:
    """Returns one agent, by its id or name, with its options and statistics."""
    return _get(_path("/v1/agents/{}", agent), schema.AgentDetail)


def list_agent_regions(
    agent: str, *, cursor: str = "", limit: int = 100
) -> Call[schema.Listed[schema.Region]]:
    """Returns regions of one agent, with their layouts."""
    return _get(
        _path("/v1/agents/{}/regions", agent), schema.Listed[schema.Region], cursor=cursor, limit=limit
    )


def list_agent_peers(agent: str, *, cursor: str = "", limit: int = 100) -> Call[schema.Listed[schema.Peer]]:
    """Returns sessions of one agent, with their rails."""
    return _get(_path("/v1/agents/{}/peers", agent), schema.Listed[schema.Peer], cursor=cursor, limit=limit)


def connect_agent(agent: str, asked: schema.ConnectRequest) -> Call[schema.Peer]:
    """Has an agent connect to another; returns the session, or the one that is open already."""
    return _send("POST", _path("/v1/agents/{}/peers", agent), schema.Peer, asked)


# ---- directory -------------------------------------------------------------------------------------


def list_entries(prefix: str = "", *, cursor: str = "", limit: int = 100) -> Call[schema.DirectoryEntries]:
    """Returns entries of the directory that the daemon keeps, whose names begin with `prefix`."""
    return _get("/v1/directory", schema.DirectoryEntries, prefix=prefix, cursor=cursor, limit=limit)


def publish_entry(asked: schema.EntryPublication) -> Call[schema.EntryPublished]:
    """Makes it the entry of its name."""
    return _send("PUT", "/v1/directory", schema.EntryPublished, asked)


def keep_entries(asked: schema.EntriesKept) -> Call[schema.EntriesLost]:
    """Begins the time of entries anew."""
    return _send("PUT", "/v1/directory/keep", schema.EntriesLost, asked)


def withdraw_entry(name: str, incarnation: str | None = None) -> Call[schema.EntryPublished]:
    """Forgets the entry of a name if it is this incarnation's; None for whichever has it."""
    made = _send("DELETE", _path("/v1/directory/entries/{}", name), schema.EntryPublished)
    return made if incarnation is None else replace(made, params=(("incarnation", incarnation),))


def list_regions(
    agent: str | None = None, *, cursor: str = "", limit: int = 100
) -> Call[schema.Listed[schema.Region]]:
    """Returns regions of all agents, or of one."""
    return _get("/v1/regions", schema.Listed[schema.Region], agent=agent, cursor=cursor, limit=limit)


def list_peers(
    agent: str | None = None, *, cursor: str = "", limit: int = 100
) -> Call[schema.Listed[schema.Peer]]:
    """Returns sessions of all agents, or of one."""
    return _get("/v1/peers", schema.Listed[schema.Peer], agent=agent, cursor=cursor, limit=limit)


def list_rails(
    agent: str | None = None, *, cursor: str = "", limit: int = 100
) -> Call[schema.Listed[schema.Rail]]:
    """Returns rails that are alive, one for each session and transport."""
    return _get("/v1/rails", schema.Listed[schema.Rail], agent=agent, cursor=cursor, limit=limit)


# ---- transfers -------------------------------------------------------------------------------------


def create_transfer(asked: schema.TransferRequest) -> Call[schema.Transfer]:
    """Has an agent copy blocks; returns when it is posted."""
    made = _send("POST", "/v1/transfers", schema.Transfer, asked)
    return replace(made, timeout_s=asked.timeout_s + PATIENCE_S)


def list_transfers(
    agent: str | None = None,
    *,
    state: schema.TransferState | None = None,
    context: str | None = None,
    tenant: str | None = None,
    since_s: float | None = None,
    cursor: str = "",
    limit: int = 100,
) -> Call[schema.Listed[schema.Transfer]]:
    """Returns transfers of which an end has ended, or which were made there, the newest first.

    Parameters
    ----------
    context
        Whose request they are for, whole, or the trace id in it.
    since_s
        Changed at or after it, in seconds since 1970.
    """
    return _get(
        "/v1/transfers",
        schema.Listed[schema.Transfer],
        agent=agent,
        state=state,
        context=context,
        tenant=tenant,
        since_s=since_s,
        cursor=cursor,
        limit=limit,
    )


def list_open_transfers(
    agent: str | None = None, *, limit: int = 100
) -> Call[schema.Listed[schema.Transfer]]:
    """Returns transfers that are open now, as their agents answer; an agent that is slow is left out."""
    return _get("/v1/open-transfers", schema.Listed[schema.Transfer], agent=agent, limit=limit)


def get_transfer(transfer: str, *, wait_s: float = 0.0) -> Call[schema.Transfer]:
    """Returns one transfer with both ends' stages; up to `wait_s` (at most 60) later, when it has ended."""
    found = _get(_path("/v1/transfers/{}", transfer), schema.Transfer, wait_s=float(wait_s))
    return replace(found, timeout_s=wait_s + PATIENCE_S)


def delete_transfer(transfer: str) -> Call[schema.Cancelled]:
    """Cancels a transfer; its record stays."""
    return _send("DELETE", _path("/v1/transfers/{}", transfer), schema.Cancelled)


def cancel_transfer(transfer: str) -> Call[schema.Cancelled]:
    """Cancels a transfer; its record stays."""
    return _send("POST", _path("/v1/transfers/{}/cancel", transfer), schema.Cancelled)


# ---- leases ----------------------------------------------------------------------------------------


def list_leases(
    agent: str | None = None, *, cursor: str = "", limit: int = 100
) -> Call[schema.Listed[schema.Lease]]:
    """Returns leases that hold or are ending."""
    return _get("/v1/leases", schema.Listed[schema.Lease], agent=agent, cursor=cursor, limit=limit)


def grant_lease(asked: schema.LeaseRequest) -> Call[schema.LeaseGranted]:
    """Has an agent grant a lease, where its owner lets the daemon."""
    return _send("POST", "/v1/leases", schema.LeaseGranted, asked)


def extend_lease(lease: str, ttl_s: float) -> Call[schema.LeaseEnded]:
    """Has a lease last `ttl_s` from now."""
    asked = schema.LeaseExtension(ttl_s=float(ttl_s))
    return _send("POST", _path("/v1/leases/{}/extend", lease), schema.LeaseEnded, asked)


def revoke_lease(lease: str) -> Call[schema.LeaseEnded]:
    """Ends a lease; when this returns, no byte under it can be read or land any more."""
    return _send("DELETE", _path("/v1/leases/{}", lease), schema.LeaseEnded)


# ---- pages -----------------------------------------------------------------------------------------


def list_pages(
    tenant: str | None = None, *, cursor: str = "", limit: int = 100
) -> Call[schema.Listed[schema.Page]]:
    """Returns pages in the order of their parking."""
    return _get("/v1/pages", schema.Listed[schema.Page], tenant=tenant, cursor=cursor, limit=limit)


def list_pools() -> Call[schema.Listed[schema.Pool]]:
    """Returns the host pool, where there is one."""
    return _get("/v1/pools", schema.Listed[schema.Pool])


def park_pages(asked: schema.ParkRequest) -> Call[schema.PagesDone]:
    """Copies blocks of an agent's region into the pool; what is answered is there to be fetched."""
    done = _send("POST", "/v1/pages/park", schema.PagesDone, asked)
    return replace(done, timeout_s=asked.timeout_s + PATIENCE_S)


def fetch_pages(asked: schema.FetchRequest) -> Call[schema.PagesDone]:
    """Copies pages into blocks of an agent's region: all of them, or none where one is missing."""
    done = _send("POST", "/v1/pages/fetch", schema.PagesDone, asked)
    return replace(done, timeout_s=asked.timeout_s + PATIENCE_S)


def lease_pages(asked: schema.PageLeaseRequest) -> Call[schema.PageLease]:
    """Grants a right to read pages, with the descriptors that ``agent.read`` takes."""
    return _send("POST", "/v1/pages/lease", schema.PageLease, asked)


def extend_page_lease(lease: str, ttl_s: float) -> Call[schema.LeaseEnded]:
    """Has such a right last `ttl_s` from now."""
    asked = schema.LeaseExtension(ttl_s=float(ttl_s))
    return _send("POST", _path("/v1/pages/lease/{}/extend", lease), schema.LeaseEnded, asked)


def revoke_page_lease(lease: str) -> Call[schema.LeaseEnded]:
    """Ends such a right; when this returns nobody reads under it."""
    return _send("DELETE", _path("/v1/pages/lease/{}", lease), schema.LeaseEnded)


def pin_pages(asked: schema.PagesRequest) -> Call[schema.PagesDone]:
    """Keeps pages from being evicted."""
    return _send("POST", "/v1/pages/pin", schema.PagesDone, asked)


def unpin_pages(asked: schema.PagesRequest) -> Call[schema.PagesDone]:
    """Lets pages be evicted."""
    return _send("POST", "/v1/pages/unpin", schema.PagesDone, asked)


def drop_pages(asked: schema.PagesRequest) -> Call[schema.PagesDone]:
    """Takes pages away; leases on them end, and when this returns nobody reads them."""
    return _send("POST", "/v1/pages/drop", schema.PagesDone, asked)


# ---- requests ---------------------------------------------------------------------------------------


def get_request_trace(request: str) -> Call[schema.RequestTrace]:
    """Returns what is known of one request: by its id, its trace's id, or a part of its id."""
    return _get("/v1/request-trace", schema.RequestTrace, request=request)


def get_perfetto_trace(request: str) -> Call[dict[str, Any]]:
    """Returns the same as a trace file for https://ui.perfetto.dev."""
    return Call("GET", "/v1/request-trace/perfetto", json.loads, (("request", request),))


def add_spans(body: bytes) -> Call[bytes]:
    """Adds spans of engines and routers: an ``ExportTraceServiceRequest`` of OTLP, in protobuf."""
    headers = {"Content-Type": "application/x-protobuf"}
    return Call("POST", "/v1/traces", bytes, body=body, headers=headers)


# ---- tokens and events -----------------------------------------------------------------------------


def whoami() -> Call[schema.WhoAmI]:
    """Returns whom the daemon takes the caller for."""
    return _get("/v1/whoami", schema.WhoAmI)


def list_tokens(*, cursor: str = "", limit: int = 100) -> Call[schema.Listed[schema.Token]]:
    """Returns tokens that were made and not revoked."""
    return _get("/v1/tokens", schema.Listed[schema.Token], cursor=cursor, limit=limit)


def create_token(asked: schema.TokenRequest) -> Call[schema.TokenMade]:
    """Makes a token; its secret is in this answer alone."""
    return _send("POST", "/v1/tokens", schema.TokenMade, asked)


def revoke_token(token: str) -> Call[schema.Token]:
    """Revokes a token by its id: the next request with it is refused."""
    return _send("DELETE", _path("/v1/tokens/{}", token), schema.Token)


def list_events(
    after: int = 0, *, topic: Iterable[str] = (), limit: int = 100
) -> Call[schema.Listed[schema.Event]]:
    """Returns events that are still there, oldest first; `next` is the index to go on behind."""
    found = _get("/v1/events/recent", schema.Listed[schema.Event], after=after, limit=limit)
    return replace(found, params=(*found.params, *(("topic", name) for name in topic)))


# ---- inside ----------------------------------------------------------------------------------------


def _path(pattern: str, name: str) -> str:
    return pattern.replace("{}", quote(name, safe=""))


def _get(path: str, answer: type[Model], **params: str | float | None) -> Call[Model]:
    told = tuple((name, str(value)) for name, value in params.items() if value not in (None, ""))
    return Call("GET", path, _reader(answer), told)


def _send(method: str, path: str, answer: type[Model], asked: BaseModel | None = None) -> Call[Model]:
    # What was left out is left out: the daemon's defaults are the ones that hold.
    body = None if asked is None else asked.model_dump_json(exclude_unset=True).encode()
    return Call(method, path, _reader(answer), body=body)


def _reader(answer: type[Model]) -> Callable[[bytes], Model]:
    def read(body: bytes) -> Model:
        try:
            return answer.model_validate_json(body)
        except ValidationError as error:
            fault: Any = error.errors()[0]
            words = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            raise ControlError("protocol", "This is no daemon's answer", words, 200) from None

    return read
