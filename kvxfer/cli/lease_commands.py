"""``kvxfer leases``: lists open leases; grants, extends or revokes one."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvxfer.cli.asking import (
    AgentOption,
    CaFileOption,
    DaemonOption,
    JsonOption,
    TokenFileOption,
    asking,
    in_time,
    lists_alone,
    print_json,
    print_rows,
    require_agent,
)
from kvxfer.cli.region_reference import RegionReference, find_region
from kvxfer.errors import invalid

app = typer.Typer(invoke_without_command=True, epilog="kvxfer leases --agent prefill-0")

LeaseArgument = Annotated[
    str, typer.Argument(metavar="LEASE", help="The lease's id, as kvxfer leases lists it.")
]


@app.callback()
def leases(
    context: typer.Context,
    agent: AgentOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List open leases; grant, extend or revoke one."""
    if not lists_alone(context):
        return
    with asking(daemon, token_file, ca_file) as client:
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
            nothing="no lease is open",
            if_empty=lambda: require_agent(client, agent),
        )


@app.command(
    epilog="kvxfer leases grant prefill-0/kv:0-7 --holder decode-0 --ttl-s 60\n\n"
    "kvxfer leases grant decode-0/kv --session 3"
)
def grant(
    place: Annotated[
        str, typer.Argument(metavar="REGION", help="agent/region[:blocks]; all blocks by default.")
    ],
    holder: Annotated[
        str, typer.Option(metavar="NAME", help="The agent that may read. Default: any agent with the token.")
    ] = "",
    session: Annotated[
        int | None,
        typer.Option(min=0, help="Let the peer of this session of the agent write (kvxfer peers)."),
    ] = None,
    ttl_s: Annotated[float, typer.Option(min=0.001, help="How long the lease lasts.")] = 30.0,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Grant a lease on blocks of an agent's region, and print its token, which gives access to them.

    The agent must let the daemon grant leases (daemon_may). The lease's id is printed on stderr.
    """
    if holder and session is not None:
        raise invalid("--holder names the reader, --session the writer: name only one")
    from kvxfer.control import schema

    wanted = RegionReference.parse(place)
    with asking(wanted.daemon or daemon, token_file, ca_file) as client:
        agent, region = find_region(client, wanted)
        granted = client.grant_lease(
            schema.LeaseRequest(
                agent=agent.id,
                region=region.name,
                blocks=None if wanted.blocks is None else list(wanted.blocks),
                mode="read" if session is None else "write",
                holder=(holder or None) if session is None else session,
                ttl_s=ttl_s,
            )
        )
    if json:
        print_json(granted)
    else:
        print(f"lease {granted.id}", file=sys.stderr)
        print(granted.token)


@app.command(epilog="kvxfer leases extend LEASE --ttl-s 120")
def extend(
    lease: LeaseArgument,
    ttl_s: Annotated[float, typer.Option(min=0.001, help="How long the lease lasts from now.")] = 30.0,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Extend a lease."""
    with asking(daemon, token_file, ca_file) as client:
        told = client.extend_lease(lease, ttl_s)
    if json:
        print_json(told)
    else:
        print(f"{told.id}: {told.state} for {in_time(ttl_s * 1e6)} more")


@app.command(epilog="kvxfer leases revoke LEASE")
def revoke(
    lease: LeaseArgument,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """End a lease with its fence: afterwards no byte under it is read or written."""
    with asking(daemon, token_file, ca_file) as client:
        told = client.revoke_lease(lease)
    if json:
        print_json(told)
    else:
        print(f"{told.id}: {told.state}")
