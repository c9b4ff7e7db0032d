"""Every operation of /v1 as a value: its request, and how its answer is read. Both clients use these.

The functions and the clients' methods have the names of the OpenAPI document's operations (`operationId`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from kvxfer.control import schema
from kvxfer.control.client.client_error import ControlError

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Model = TypeVar("Model", bound=BaseModel)

#: How long an answer may take to begin, in addition to the time that the request itself asks for.
PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One request, and how to read its answer.

    Attributes
    ----------
    also
        Statuses that bring an answer, besides those of success.
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
        """Returns the call for the page of a list at a cursor."""
        kept = tuple(param for param in self.params if param[0] != "cursor")
        return replace(self, params=(*kept, ("cursor", cursor)))


# ---- the node --------------------------------------------------------------------------------------


def healthz() -> Call[schema.Health]:
    """Answers while the daemon runs."""
    return _get("/healthz", schema.Health)


def readyz() -> Call[schema.Readiness]:
    """Returns whether it takes work, and if not, why."""
    return replace(_get("/readyz", schema.Readiness), also=frozenset({503}))


def get_node() -> Call[schema.Node]:
    """Returns the daemon that answers."""
    return _get("/v1/node", schema.Node)


def get_topology() -> Call[schema.Topology]:
    """Returns the machine, its agents, and their sessions with their rails."""
    return _get("/v1/topology", schema.Topology)


def get_doctor(require: Iterable[str] = ()) -> Call[schema.Doctor]:
    """Returns the findings of ``kvxfer doctor`` on the daemon's host; kept for ten seconds."""
    return _get("/v1/doctor", schema.Doctor, require=",".join(require))


def get_metrics() -> Call[str]:
    """Returns figures in Prometheus' text."""
    return Call("GET", "/metrics", lambda body: body.decode())


def get_settings() -> Call[schema.Settings]:
    """Returns the settings that can change while the daemon runs."""
    return _get("/v1/settings", schema.Settings)


def change_settings(asked: schema.SettingsChange) -> Call[schema.Settings]:
    """Changes the settings that are named, and no others; returns all settings."""
    return _send("PATCH", "/v1/settings", schema.Settings, asked)


def get_drain() -> Call[schema.Drain]:
    """Returns whether the node drains, and is ready to stop."""
    return _get("/v1/drain", schema.Drain)


def begin_drain(deadline_s: float = 300.0) -> Call[schema.Drain]:
    """Refuses new work from now on; running work goes on, for at most `deadline_s`."""
    return _send("PUT", "/v1/drain", schema.Drain, schema.DrainRequest(deadline_s=float(deadline_s)))


def end_drain() -> Call[schema.Drain]:
    """Ends a drain."""
    return _send("DELETE", "/v1/drain", schema.Drain)


# ---- agents ----------------------------------------------------------------------------------------


def list_agents(*, cursor: str = "", limit: int = 100) -> Call[schema.Listed[schema.Agent]]:
    """Returns attached agents, including the daemon's own."""
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
    """Has an agent connect to another; returns the new session, or the one that is open already."""
    return _send("POST", _path("/v1/agents/{}/peers", agent), schema.Peer, asked)


# ---- directory -------------------------------------------------------------------------------------


def list_entries(prefix: str = "", *, cursor: str = "", limit: int = 100) -> Call[schema.DirectoryEntries]:
    """Returns entries of the daemon's directory whose names begin with `prefix`."""
    return _get("/v1/directory", schema.DirectoryEntries, prefix=prefix, cursor=cursor, limit=limit)


def publish_entry(asked: schema.EntryPublication) -> Call[schema.EntryPublished]:
    """Publishes an entry under its name."""
    return _send("PUT", "/v1/directory", schema.EntryPublished, asked)


def keep_entries(asked: schema.EntriesKept) -> Call[schema.EntriesLost]:
    """Starts the time of entries anew."""
    return _send("PUT", "/v1/directory/keep", schema.EntriesLost, asked)


def withdraw_entry(name: str, incarnation: str | None = None) -> Call[schema.EntryPublished]:
    """Removes the entry of a name, if it belongs to this incarnation; None for any incarnation."""
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
    """Returns rails that are up, one for each session and transport."""
    return _get("/v1/rails", schema.Listed[schema.Rail], agent=agent, cursor=cursor, limit=limit)


# ---- transfers -------------------------------------------------------------------------------------


def create_transfer(asked: schema.TransferRequest) -> Call[schema.Transfer]:
    """Has an agent copy blocks; returns when the transfer is posted."""
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
    """Returns transfers that were made there, or have an end that has ended; the newest first.

    Parameters
    ----------
    context
        The context of their request: the whole context, or the trace id in it.
    since_s
        Transfers that changed at this time or later, in seconds since 1970.
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
    """Returns transfers that are open now, as their agents answer; leaves out agents that are slow."""
    return _get("/v1/open-transfers", schema.Listed[schema.Transfer], agent=agent, limit=limit)


def get_transfer(transfer: str, *, wait_s: float = 0.0) -> Call[schema.Transfer]:
    """Returns a transfer with both ends' stages; waits up to `wait_s` (at most 60) for its end."""
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
    """Has an agent grant a lease, if its owner permits that."""
    return _send("POST", "/v1/leases", schema.LeaseGranted, asked)


def extend_lease(lease: str, ttl_s: float) -> Call[schema.LeaseEnded]:
    """Makes a lease last `ttl_s` from now."""
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
    """Returns the host pool, if there is one."""
    return _get("/v1/pools", schema.Listed[schema.Pool])


def park_pages(asked: schema.ParkRequest) -> Call[schema.PagesDone]:
    """Copies blocks of an agent's region into the pool; when this returns, the pages can be fetched."""
    done = _send("POST", "/v1/pages/park", schema.PagesDone, asked)
    return replace(done, timeout_s=asked.timeout_s + PATIENCE_S)


def fetch_pages(asked: schema.FetchRequest) -> Call[schema.PagesDone]:
    """Copies pages into blocks of an agent's region: all of them, or none if one is missing."""
    done = _send("POST", "/v1/pages/fetch", schema.PagesDone, asked)
    return replace(done, timeout_s=asked.timeout_s + PATIENCE_S)


def lease_pages(asked: schema.PageLeaseRequest) -> Call[schema.PageLease]:
    """Grants a right to read pages, with the descriptors that ``agent.read`` takes."""
    return _send("POST", "/v1/pages/lease", schema.PageLease, asked)


def extend_page_lease(lease: str, ttl_s: float) -> Call[schema.LeaseEnded]:
    """Makes such a lease last `ttl_s` from now."""
    asked = schema.LeaseExtension(ttl_s=float(ttl_s))
    return _send("POST", _path("/v1/pages/lease/{}/extend", lease), schema.LeaseEnded, asked)


def revoke_page_lease(lease: str) -> Call[schema.LeaseEnded]:
    """Ends such a lease; when this returns, no agent reads pages under it."""
    return _send("DELETE", _path("/v1/pages/lease/{}", lease), schema.LeaseEnded)


def pin_pages(asked: schema.PagesRequest) -> Call[schema.PagesDone]:
    """Keeps pages from being evicted."""
    return _send("POST", "/v1/pages/pin", schema.PagesDone, asked)


def unpin_pages(asked: schema.PagesRequest) -> Call[schema.PagesDone]:
    """Permits pages to be evicted again."""
    return _send("POST", "/v1/pages/unpin", schema.PagesDone, asked)


def drop_pages(asked: schema.PagesRequest) -> Call[schema.PagesDone]:
    """Removes pages and ends leases on them; when this returns, no agent reads them."""
    return _send("POST", "/v1/pages/drop", schema.PagesDone, asked)


# ---- requests ---------------------------------------------------------------------------------------


def get_request_trace(request: str) -> Call[schema.RequestTrace]:
    """Returns what is known of one request, found by its id, a part of its id, or its trace's id."""
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
    """Returns the caller, as the daemon has identified it."""
    return _get("/v1/whoami", schema.WhoAmI)


def list_tokens(*, cursor: str = "", limit: int = 100) -> Call[schema.Listed[schema.Token]]:
    """Returns tokens that were made and not revoked."""
    return _get("/v1/tokens", schema.Listed[schema.Token], cursor=cursor, limit=limit)


def create_token(asked: schema.TokenRequest) -> Call[schema.TokenMade]:
    """Makes a token; only this answer has its secret."""
    return _send("POST", "/v1/tokens", schema.TokenMade, asked)


def revoke_token(token: str) -> Call[schema.Token]:
    """Revokes a token by its id: the next request with it is refused."""
    return _send("DELETE", _path("/v1/tokens/{}", token), schema.Token)


def list_events(
    after: int = 0, *, topic: Iterable[str] = (), limit: int = 100
) -> Call[schema.Listed[schema.Event]]:
    """Returns events that are still kept, oldest first; `next` is the index to continue after."""
    found = _get("/v1/events/recent", schema.Listed[schema.Event], after=after, limit=limit)
    return replace(found, params=(*found.params, *(("topic", name) for name in topic)))


# ---- inside ----------------------------------------------------------------------------------------


def _path(pattern: str, name: str) -> str:
    return pattern.replace("{}", quote(name, safe=""))


def _get(path: str, answer: type[Model], **params: str | float | None) -> Call[Model]:
    told = tuple((name, str(value)) for name, value in params.items() if value not in (None, ""))
    return Call("GET", path, _reader(answer), told)


def _send(method: str, path: str, answer: type[Model], asked: BaseModel | None = None) -> Call[Model]:
    # Fields that the caller left out are not sent, so that the daemon's defaults apply.
    body = None if asked is None else asked.model_dump_json(exclude_unset=True).encode()
    return Call(method, path, _reader(answer), body=body)


def _reader(answer: type[Model]) -> Callable[[bytes], Model]:
    def read(body: bytes) -> Model:
        try:
            return answer.model_validate_json(body)
        except ValidationError as error:
            fault: Any = error.errors()[0]
            words = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            raise ControlError("protocol", "This is not a daemon's answer", words, 200) from None

    return read
