"""``kvxfer agents``, ``regions`` and ``peers``: attached agents, their regions and their sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.cli.asking import (
    AgentOption,
    CaFileOption,
    DaemonOption,
    JsonOption,
    TokenFileOption,
    ago,
    asking,
    in_bytes,
    plain,
    print_one,
    print_rows,
    require_agent,
)
from kvxfer.errors import invalid

if TYPE_CHECKING:
    from kvxfer.control.client.rest_client import Client


def agents(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Show this agent: its id or name.")] = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List attached agents, or show one with its options and statistics.

    kvxfer agents

    kvxfer agents prefill-0 --json
    """
    with asking(daemon, token_file, ca_file) as client:
        if agent:
            print_one(client.get_agent(_id_of(client, agent)), json)
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
            nothing="no agent is attached: agents attach with AgentOptions(daemon=...)",
        )


def regions(
    agent: AgentOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List the regions of agents; with --json also their layouts.

    kvxfer regions --agent prefill-0
    """
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
            if_empty=lambda: require_agent(client, agent),
        )


def peers(
    agent: AgentOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List the sessions of agents, with the rails that pages take. SESSION is the agent's number of it.

    kvxfer peers --agent prefill-0
    """
    with asking(daemon, token_file, ca_file) as client:
        print_rows(
            client.peers(agent or None),
            [
                ("AGENT", lambda row: row.agent_name),
                ("SESSION", lambda row: row.session),
                ("PEER", lambda row: row.name),
                ("PEER'S ID", lambda row: row.id),
                ("ADDRESS", lambda row: row.address),
                ("RAILS", lambda row: row.rails),
                ("REGIONS", lambda row: row.regions),
                ("NOTES", lambda row: row.notes or None),
            ],
            as_json=json,
            nothing=f"{plain(agent)} has no session" if agent else "no agent is connected to another",
            if_empty=lambda: require_agent(client, agent),
        )


def _id_of(client: Client, agent: str) -> str:
    """Returns an agent's id: a name may contain characters that a path may not."""
    named = [each.id for each in client.agents() if agent in (each.id, each.name)]
    if len(named) > 1:
        raise invalid(f"{len(named)} agents are called {agent!r}: name one by its id (kvxfer agents)")
    if not named:
        raise invalid(f"no agent {agent!r} is attached: kvxfer agents lists them")
    return named[0]
