"""``kvxfer transfers``: lists transfers, shows one with its stages, cancels one."""

from __future__ import annotations

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
    asking,
    counted,
    in_bytes,
    in_time,
    plain,
    print_json,
    print_rows,
    require_agent,
)
from kvxfer.errors import invalid

if TYPE_CHECKING:
    from kvxfer.control import schema
    from kvxfer.control.client.rest_client import Client

# The daemon's limit for one page of a list.
_MOST_OPEN = 250


def transfers(
    transfer: Annotated[
        str, typer.Argument(metavar="TRANSFER", help="Show this transfer, by its id, with its stages.")
    ] = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel that transfer.")] = False,
    running: Annotated[bool, typer.Option("--open", help="Only transfers that are open now.")] = False,
    agent: AgentOption = "",
    state: Annotated[
        str, typer.Option(metavar="pending|done|failed|cancelled", help="Only transfers in this state.")
    ] = "",
    context: Annotated[
        str, typer.Option(metavar="REQUEST", help="Only of this request: its context, or its trace id.")
    ] = "",
    tenant: Annotated[str, typer.Option(help="Only of this tenant.")] = "",
    limit: LimitOption = 50,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List transfers, the newest first; show one with both ends' stages, or cancel it.

    kvxfer transfers --open --agent decode-0

    kvxfer transfers TRANSFER --cancel
    """
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
                if_empty=lambda: require_agent(client, agent),
            )


def _cancel(client: Client, transfer: str, as_json: bool) -> None:
    told = client.cancel_transfer(transfer)
    if as_json:
        print_json(told)
    else:
        print(f"{told.id}: {'cancelled' if told.found else 'it had ended'}")


def _print_transfer(client: Client, id_: str, as_json: bool) -> None:
    from kvxfer.control.client.client_error import ControlError

    try:
        transfer = client.get_transfer(id_)
    except ControlError as error:
        # Only the agents know an open end that was not made by REST.
        found = [each for each in client.list_open_transfers(limit=_MOST_OPEN).items if each.id == id_]
        if error.code != "not-found" or not found:
            raise
        transfer = found[0]
    if as_json:
        print_json(transfer)
    else:
        print("\n".join(lines_of(transfer)))


def lines_of(transfer: schema.Transfer) -> list[str]:
    """Returns a transfer as lines: what it is, and the stages of its ends."""
    lines = [f"{transfer.id}: {transfer.state}"]
    if transfer.code:
        lines[0] += f" [{transfer.code}] {plain(transfer.message)}"
    lines.append(
        f"  {counted(transfer.num_blocks, 'block')}, {counted(transfer.num_layers, 'layer')}, "
        + in_bytes(transfer.nbytes)
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
                lines.append(f"  {word} {plain(name)}: the daemon of its node has its stages")
            continue
        lines.append(
            f"  {word} {plain(end.region_name) or end.region} of {plain(end.agent_name) or end.agent}"
            f"{' (began it)' if end.began_it else ''}: {end.state}, {in_bytes(end.nbytes_done)}"
            f"{' over ' + ', '.join(end.rails) if end.rails else ''}"
        )
        lines += [
            f"    {in_time(after_us):>10}  {what}"
            for what, after_us in (
                ("posted here", 0.0 if end.posted_at_s else None),
                ("begun", end.begun_after_us),
                ("first piece", end.first_piece_after_us),
                (end.outcome, end.ended_after_us),
            )
            if after_us is not None
        ]
    return lines


def took_us(transfer: schema.Transfer) -> float | None:
    """Returns a transfer's duration, as measured by the end that began it."""
    ends = [end for end in (transfer.source, transfer.destination) if end is not None]
    ends.sort(key=lambda end: not end.began_it)
    return next((end.ended_after_us for end in ends if end.ended_after_us is not None), None)


def _state(text: str) -> Any:
    if text and text not in ("pending", "done", "failed", "cancelled"):
        raise invalid(f"--state must be pending, done, failed or cancelled, not {text!r}")
    return text or None


def _end(end: schema.TransferEnd | None, other: schema.TransferEnd | None) -> str | None:
    """Returns an end's name; for an end attached elsewhere, the name that the other end has for it."""
    if end is not None:
        return f"{end.agent_name or end.agent[:8]}/{end.region_name or end.region}"
    if other is None or not other.peer:
        return None
    return f"{other.peer_name}/{other.remote_region_name or other.remote_region or '?'}"
