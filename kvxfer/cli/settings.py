"""``kvxfer settings``: shows and changes the settings of a running daemon and its agents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.cli.asking import (
    CaFileOption,
    DaemonOption,
    JsonOption,
    TokenFileOption,
    asking,
    in_bytes,
    plain,
    print_json,
)
from kvxfer.errors import invalid

if TYPE_CHECKING:
    from kvxfer.control import schema

_NONE = "none"


def settings(
    agent: Annotated[
        str,
        typer.Option(metavar="AGENT", help="The agent to which --rate, --least-priority and --rail apply."),
    ] = "",
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER=BYTES", help="Bytes per second that the agent takes from a peer, or none."
        ),
    ] = None,
    least_priority: Annotated[
        list[str] | None,
        typer.Option(metavar="PEER=NUMBER", help="The lowest priority number of its transfers with a peer."),
    ] = None,
    rail: Annotated[
        list[str] | None,
        typer.Option(metavar="TRANSPORT=on|off", help="Switch rails of a transport."),
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Undo all settings of the agent.")] = False,
    log_level: Annotated[
        str,
        typer.Option(
            metavar="LEVEL", help="Log level of the daemon, or of --agent: debug, info, warning, error."
        ),
    ] = "",
    quota: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT=BYTES", help="Bytes of pages that a tenant may park, or none."),
    ] = None,
    tenant_rate: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT=BYTES", help="Bytes per second that a tenant may ask for, or none."),
    ] = None,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Show or change the settings of a running node.

    Options that name a peer, a transport or a tenant may be repeated.

    kvxfer settings

    kvxfer settings --agent decode-0 --rate prefill-0=1000000000 --rail tcp=off

    kvxfer settings --quota red=10737418240 --log-level debug
    """
    of_agent = bool(rate or least_priority or rail or forget)
    if of_agent and not agent:
        raise invalid("name the agent: --agent NAME (kvxfer agents lists them)")
    if agent and not of_agent and not log_level:
        raise invalid(
            "name what to change for the agent: --rate, --least-priority, --rail, --forget or --log-level"
        )
    if forget and (rate or least_priority or rail):
        raise invalid("--forget cannot be combined with --rate, --least-priority or --rail")
    from pydantic import ValidationError

    from kvxfer.control import schema

    with asking(daemon, token_file, ca_file) as client:
        found = client.get_settings()
        asked: dict[str, Any] = {}
        if of_agent:
            names = {each.id: each.name for each in client.agents()}
            kept = found.agents.get(names.get(agent, agent), schema.AgentSettings())
            asked["agents"] = {agent: None if forget else _of_agent(kept, rate, least_priority, rail)}
        if log_level:
            asked |= {"agents_log_level": {agent: log_level}} if agent else {"log_level": log_level}
        if quota:
            asked["page_quotas_nbytes"] = {
                name: _number(text, "--quota") for name, text in _pairs(quota, "--quota")
            }
        if tenant_rate:
            asked["tenant_bytes_per_s"] = {
                name: _number(text, "--tenant-rate") for name, text in _pairs(tenant_rate, "--tenant-rate")
            }
        if asked:
            try:
                change = schema.SettingsChange.model_validate(asked)
            except ValidationError as error:
                first = error.errors()[0]
                raise invalid(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
            found = client.change_settings(change)
    if json:
        print_json(found)
    else:
        print("\n".join(_lines(found)))


def _of_agent(
    kept: schema.AgentSettings, rate: list[str] | None, least: list[str] | None, rails: list[str] | None
) -> dict[str, Any]:
    """Returns the change of an agent: of both limits of a peer, the unnamed one keeps its value."""
    peers: dict[str, dict[str, Any]] = {}

    def limit_of(peer: str) -> dict[str, Any]:
        if peer not in peers:
            peers[peer] = kept.peers[peer].model_dump() if peer in kept.peers else {}
        return peers[peer]

    for peer, text in _pairs(rate, "--rate"):
        limit_of(peer)["max_bytes_per_s"] = _number(text, "--rate")
    for peer, text in _pairs(least, "--least-priority"):
        limit_of(peer)["least_priority"] = _number(text, "--least-priority") or 0
    return {"peers": peers, "rails": dict(_pairs(rails, "--rail"))}


def _pairs(given: list[str] | None, option: str) -> Iterator[tuple[str, str]]:
    for text in given or ():
        name, sign, value = text.rpartition("=")
        if not sign:
            raise invalid(f"{option} {text!r} has no '='")
        yield name, value


def _number(text: str, option: str) -> int | None:
    if text == _NONE:
        return None
    if not text.isascii() or not text.isdigit():
        raise invalid(f"{option}: {text!r} is neither a whole number nor {_NONE!r}")
    return int(text)


def _lines(found: schema.Settings) -> Iterator[str]:
    yield f"log level  {found.log_level}"
    for id_, level in found.agents_log_level.items():
        yield f"log level of agent {plain(id_)}  {level}"
    for tenant, nbytes in found.page_quotas_nbytes.items():
        yield f"tenant {tenant!r}  parks up to {in_bytes(nbytes)}"
    for tenant, nbytes in found.tenant_bytes_per_s.items():
        yield f"tenant {tenant!r}  asks for up to {in_bytes(nbytes)}/s"
    for name, kept in found.agents.items():
        for peer, limit in kept.peers.items():
            rate = "any rate" if limit.max_bytes_per_s is None else f"{in_bytes(limit.max_bytes_per_s)}/s"
            least = limit.least_priority
            yield f"agent {plain(name)}, peer {plain(peer)}  {rate}, priority {least} and later"
        for transport in kept.rails:
            yield f"agent {plain(name)}, rails of {plain(transport)}  off"
        for id_, why in kept.refused.items():
            yield f"agent {plain(name)} ({plain(id_)})  did not apply this: {plain(why)}"
