"""Commands over a daemon's REST: what is there, and what changes it."""

from __future__ import annotations

import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.cli.asking import (
    AgentOption,
    CaFileOption,
    DaemonOption,
    JsonOption,
    LimitOption,
    TokenFileOption,
    ago,
    asking,
    in_bytes,
    in_time,
    plain,
    print_json,
    print_rows,
)
from kvxfer.errors import invalid

if TYPE_CHECKING:
    from kvxfer.control import schema
    from kvxfer.control.client import Client

# What was asked for was not reached; 2 is "could not run as asked" (app.py).
_FAILED = 1
_LOOK_S = 0.5
# Of one page of a list, as the daemon has it.
_MOST_OPEN = 250


def agents(
    agent: Annotated[str, typer.Argument(help="One of them: its id or name.")] = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List agents that are attached; of one, its options and statistics."""
    with asking(daemon, token_file, ca_file) as client:
        if agent:
            _print_one(client.get_agent(id_of(client, agent)), json)
            return
        print_rows(
            client.agents(),
            [
                ("AGENT", lambda row: row.name),
                ("ID", lambda row: row.id),
                ("PID", lambda row: row.pid),
                ("ADDRESS", lambda row: row.address),
                ("REGIONS", lambda row: row.regions),
                ("PEERS", lambda row: row.peers),
                ("LEASES", lambda row: row.leases),
                ("MAY", lambda row: row.may),
                ("ATTACHED", lambda row: ago(row.attached_at_s) + (", drains" if row.draining else "")),
            ],
            as_json=json,
            nothing="no agent is attached: AgentOptions(daemon=...) says how one does",
        )


def regions(
    agent: AgentOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List the regions of agents; --json with their layouts."""
    with asking(daemon, token_file, ca_file) as client:
        print_rows(
            client.regions(agent or None),
            [
                ("REGION", lambda row: row.name),
                ("AGENT", lambda row: row.agent_name),
                ("KIND", lambda row: row.kind),
                ("BLOCKS", lambda row: row.num_blocks),
                ("SIZE", lambda row: in_bytes(row.nbytes)),
                ("NOTES", lambda row: row.notes or None),
            ],
            as_json=json,
            nothing="no region is registered",
        )


def peers(
    agent: AgentOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List the sessions of agents, with the rails that pages take."""
    with asking(daemon, token_file, ca_file) as client:
        print_rows(
            client.peers(agent or None),
            [
                ("AGENT", lambda row: row.agent_name),
                ("PEER", lambda row: row.name),
                ("PEER'S ID", lambda row: row.id),
                ("ADDRESS", lambda row: row.address),
                ("RAILS", lambda row: row.rails),
                ("REGIONS", lambda row: row.regions),
                ("NOTES", lambda row: row.notes or None),
            ],
            as_json=json,
            nothing="no agent is connected to another",
        )


def transfers(
    transfer: Annotated[str, typer.Argument(help="One of them, by its id: with its stages.")] = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel that one.")] = False,
    running: Annotated[bool, typer.Option("--open", help="Those that are open now.")] = False,
    agent: AgentOption = "",
    state: Annotated[str, typer.Option(help="pending, done, failed or cancelled.")] = "",
    context: Annotated[str, typer.Option(help="Of this request: its context, or its trace id.")] = "",
    tenant: Annotated[str, typer.Option(help="Of this tenant.")] = "",
    limit: LimitOption = 50,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List transfers, the newest first; show one with both ends' stages, or cancel it."""
    if cancel and not transfer:
        raise invalid("--cancel needs a transfer's id: kvxfer transfers --open lists those that run")
    wanted = _state(state)
    with asking(daemon, token_file, ca_file) as client:
        if cancel:
            _cancel(client, transfer, json)
        elif transfer:
            _print_transfer(client, transfer, json)
        else:
            found = (
                iter(client.list_open_transfers(agent or None, limit=min(limit, _MOST_OPEN)).items)
                if running
                else client.transfers(
                    agent or None, state=wanted, context=context or None, tenant=tenant or None
                )
            )
            print_rows(
                islice(found, limit),
                [
                    ("TRANSFER", lambda row: row.id),
                    ("STATE", lambda row: f"{row.state} [{row.code}]" if row.code else row.state),
                    ("FROM", lambda row: _end(row.source, row.destination)),
                    ("TO", lambda row: _end(row.destination or row.expectation, row.source)),
                    ("BLOCKS", lambda row: row.num_blocks),
                    ("SIZE", lambda row: in_bytes(row.nbytes)),
                    ("TOOK", lambda row: in_time(took_us(row))),
                    ("CONTEXT", lambda row: row.context or None),
                ],
                as_json=json,
                nothing="no such transfer",
            )


def _cancel(client: Client, transfer: str, as_json: bool) -> None:
    told = client.cancel_transfer(transfer)
    if as_json:
        print_json(told)
    else:
        print(f"{told.id}: {'cancelled' if told.found else 'it had ended'}")


def _print_transfer(client: Client, id_: str, as_json: bool) -> None:
    from kvxfer.control.client_error import ControlError

    try:
        transfer = client.get_transfer(id_)
    except ControlError as error:
        # An end that is open and was not made by REST is known to its agents alone.
        found = [each for each in client.list_open_transfers(limit=_MOST_OPEN).items if each.id == id_]
        if error.code != "not-found" or not found:
            raise
        transfer = found[0]
    if as_json:
        print_json(transfer)
    else:
        print("\n".join(told_of(transfer)))


def told_of(transfer: schema.Transfer) -> list[str]:
    """Returns a transfer as lines: what it is, and the stages of its ends."""
    lines = [f"{transfer.id}: {transfer.state}"]
    if transfer.code:
        lines[0] += f" [{transfer.code}] {plain(transfer.message)}"
    lines.append(
        f"  {transfer.num_blocks} blocks, {transfer.num_layers} layers, {in_bytes(transfer.nbytes)}"
        + (f", for {plain(transfer.context)}" if transfer.context else "")
        + (f", tenant {transfer.tenant}" if transfer.tenant else "")
    )
    ends = (
        ("from", transfer.source, transfer.destination),
        ("to", transfer.destination, transfer.source),
        ("expected by", transfer.expectation, None),
    )
    for word, end, other in ends:
        if end is None:
            if other is not None and (name := _end(None, other)) is not None:
                lines.append(f"  {word} {plain(name)}, whose daemon has its stages")
            continue
        lines.append(
            f"  {word} {plain(end.region_name) or end.region} of {plain(end.agent_name) or end.agent}"
            f"{' (began it)' if end.began_it else ''}: {end.state}, {in_bytes(end.nbytes_done)}"
            f"{' over ' + ', '.join(end.rails) if end.rails else ''}"
        )
        lines += [
            f"    {in_time(after_us):>10}  {what}"
            for what, after_us in (
                ("begun", end.begun_after_us),
                ("first piece", end.first_piece_after_us),
                (end.outcome, end.ended_after_us),
            )
            if after_us is not None
        ]
    return lines


def took_us(transfer: schema.Transfer) -> float | None:
    """Returns how long a transfer took, as the end has it that began it."""
    ends = [end for end in (transfer.source, transfer.destination) if end is not None]
    ends.sort(key=lambda end: not end.began_it)
    return next((end.ended_after_us for end in ends if end.ended_after_us is not None), None)


def leases(
    lease: Annotated[str, typer.Argument(help="One of them, by its id.")] = "",
    revoke: Annotated[bool, typer.Option("--revoke", help="End that one, with its fence.")] = False,
    extend_s: Annotated[
        float, typer.Option("--extend-s", min=0.0, help="Have that one last so long from now.")
    ] = 0.0,
    agent: AgentOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List leases that hold; end one, or have it last longer."""
    if (revoke or extend_s) and not lease:
        raise invalid("--revoke and --extend-s need a lease's id: kvxfer leases lists them")
    if lease and not revoke and not extend_s:
        raise invalid("say what to do with this lease: --revoke or --extend-s")
    with asking(daemon, token_file, ca_file) as client:
        if lease:
            ended = client.revoke_lease(lease) if revoke else client.extend_lease(lease, extend_s)
            if json:
                print_json(ended)
            else:
                print(f"{ended.id}: {ended.state}")
            return
        print_rows(
            client.leases(agent or None),
            [
                ("LEASE", lambda row: row.id),
                ("OF", lambda row: f"{row.region_name} of {row.agent_name}"),
                ("HOLDER", lambda row: row.holder or None),
                ("MODE", lambda row: row.mode),
                ("BLOCKS", lambda row: "all" if row.num_blocks is None else row.num_blocks),
                ("STATE", lambda row: row.state),
                ("LEFT", lambda row: in_time(None if row.seconds_left is None else row.seconds_left * 1e6)),
            ],
            as_json=json,
            nothing="no lease holds",
        )


def pages(
    pool: Annotated[bool, typer.Option("--pool", help="How full the pool is.")] = False,
    tenant: Annotated[str, typer.Option(help="Of this tenant.")] = "",
    limit: LimitOption = 100,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List the pages of the host pool, or say how full it is."""
    with asking(daemon, token_file, ca_file) as client:
        if pool:
            print_rows(
                client.list_pools().items,
                [
                    ("POOL", lambda row: row.name),
                    ("USED", lambda row: f"{in_bytes(row.used_nbytes)} of {in_bytes(row.nbytes)}"),
                    ("PINNED", lambda row: in_bytes(row.pinned_nbytes)),
                    ("PAGES", lambda row: row.pages),
                    ("LEASES", lambda row: row.leases),
                    ("HITS", lambda row: row.hits_total),
                    ("MISSES", lambda row: row.misses_total),
                    ("EVICTED", lambda row: row.evicted_total),
                ],
                as_json=json,
                nothing="this daemon keeps no pages: kvxfer serve --pool-gib says how many",
            )
            return
        print_rows(
            islice(client.pages(tenant or None), limit),
            [
                ("KEY", lambda row: row.key),
                ("TENANT", lambda row: row.tenant or None),
                ("MODEL", lambda row: f"{row.model} {row.revision}".strip()),
                ("LAYOUT", lambda row: row.layout[:12]),
                ("STATE", lambda row: row.state + (", pinned" if row.pinned else "")),
                ("SIZE", lambda row: in_bytes(row.nbytes)),
                ("FETCHES", lambda row: row.fetches),
            ],
            as_json=json,
            nothing="no page is kept",
        )


def drain(
    deadline_s: Annotated[float, typer.Option(min=0.1, help="How long what runs may go on.")] = 300.0,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is ready to stop.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take a drain back.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Say how far it is, and change nothing.")] = False,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Have a node refuse new work and finish what runs; status 1 with --wait if it is not ready in time."""
    if undo and (wait or show):
        raise invalid("--undo stands alone")
    with asking(daemon, token_file, ca_file) as client:
        if undo:
            found = client.end_drain()
        elif show:
            found = client.get_drain()
        else:
            found = client.begin_drain(deadline_s)
        until_s = time.monotonic() + deadline_s
        while wait and not found.ready and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            found = client.get_drain()
    if json:
        print_json(found)
    else:
        words = "ready to stop" if found.ready else f"drains: {found.running} transfers run"
        print(words if found.draining else "takes work")
        for each in found.agents:
            if each.refused:
                print(f"  {plain(each.name)} was not drained: {plain(each.refused)}", file=sys.stderr)
    if wait and not found.ready:
        raise typer.Exit(_FAILED)


def tokens(
    token: Annotated[str, typer.Argument(help="One of them, by its id.")] = "",
    revoke: Annotated[bool, typer.Option("--revoke", help="Revoke that one.")] = False,
    create: Annotated[str, typer.Option(metavar="NAME", help="Make one of this name.")] = "",
    role: Annotated[str, typer.Option(help="What it may: read, transfer or admin.")] = "read",
    tenant: Annotated[list[str] | None, typer.Option(help="For this tenant alone; may be repeated.")] = None,
    ttl_s: Annotated[float, typer.Option(min=0.0, help="How long it is valid; 0: until revoked.")] = 0.0,
    out: Annotated[str, typer.Option(metavar="FILE", help="Write the new token there (0600).")] = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List tokens; make one, which is written to a file or stdout once; revoke one."""
    if revoke and not token:
        raise invalid("--revoke needs a token's id: kvxfer tokens lists them")
    if create and role not in ("read", "transfer", "admin"):
        raise invalid(f"--role is read, transfer or admin, not {role!r}")
    with asking(daemon, token_file, ca_file) as client:
        if revoke:
            _print_one(client.revoke_token(token), json)
        elif create:
            _create_token(client, create, role, tenant, ttl_s, out, as_json=json)
        else:
            print_rows(
                client.tokens(),
                [
                    ("TOKEN", lambda row: row.id),
                    ("NAME", lambda row: row.name),
                    ("ROLE", lambda row: row.role),
                    ("TENANTS", lambda row: "all" if row.tenants is None else row.tenants),
                    ("MADE", lambda row: ago(row.made_at_s) + " ago"),
                    ("EXPIRES", lambda row: _until(row.expires_at_s)),
                ],
                as_json=json,
                nothing="there is no token",
            )


def _create_token(
    client: Client,
    name: str,
    role: Any,
    tenants: list[str] | None,
    ttl_s: float,
    out: str,
    *,
    as_json: bool,
) -> None:
    import os

    from kvxfer.control import schema

    made = None
    if out:
        # Before the token is made: one whose secret can be written nowhere is of no use.
        try:
            file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise invalid(f"--out {out} cannot be made: {error.strerror}") from None
    try:
        made = client.create_token(
            schema.TokenRequest(name=name, role=role, tenants=tenants or None, ttl_s=ttl_s or None)
        )
        if out:
            os.write(file, made.secret.encode() + b"\n")
    finally:
        if out:
            os.close(file)
            if made is None:
                os.unlink(out)  # noqa: PTH108  # of the same kind as its making
    if out:
        print(f"token {made.id} is in {out}", file=sys.stderr)
    elif as_json:
        print_json(made)
    else:
        print(made.secret)


def id_of(client: Client, agent: str) -> str:
    """Returns an agent's id: a name may hold what a path may not."""
    named = [each.id for each in client.agents() if agent in (each.id, each.name)]
    if len(named) > 1:
        raise invalid(f"{len(named)} agents are called {agent!r}: name one by its id (kvxfer agents)")
    if not named:
        raise invalid(f"no agent {agent!r} is attached: kvxfer agents lists them")
    return named[0]


def _state(text: str) -> Any:
    if text and text not in ("pending", "done", "failed", "cancelled"):
        raise invalid(f"--state is pending, done, failed or cancelled, not {text!r}")
    return text or None


def _end(end: schema.TransferEnd | None, other: schema.TransferEnd | None) -> str | None:
    """Returns what an end is called; of one that is attached elsewhere, as the other end calls it."""
    if end is not None:
        return f"{end.agent_name or end.agent[:8]}/{end.region_name or end.region}"
    if other is None or not other.peer:
        return None
    return f"{other.peer_name}/{other.remote_region_name or other.remote_region or '?'}"


def _until(at_s: float | None) -> str:
    if at_s is None:
        return "never"
    left_s = at_s - time.time()
    return f"in {in_time(left_s * 1e6)}" if left_s > 0 else "expired"


def _print_one(shown: Any, as_json: bool) -> None:
    if as_json:
        print_json(shown)
        return
    told = shown.model_dump(mode="json")
    width = max(map(len, told))
    for name, value in told.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={each}" for key, each in value.items()) or None
        print(f"{name:{width}}  {plain(value)}")
