"""``kvxfer move``: copies blocks from a region at one daemon to a region at another, only by REST."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.cli.asking import (
    FAILED,
    CaFileOption,
    DaemonOption,
    JsonOption,
    asking,
    in_bytes,
    in_time,
    print_json,
)
from kvxfer.cli.region_reference import PlacedRegion, RegionReference
from kvxfer.cli.right_to_write import revoke_quietly, right_to_write
from kvxfer.cli.transfer_commands import lines_of, took_us
from kvxfer.errors import invalid

if TYPE_CHECKING:
    from kvxfer.control import schema
    from kvxfer.control.client.rest_client import Client

Request = dict[str, object]
Say = Callable[[str], None]

# The daemon answers after this time that the transfer has not ended, and is asked again.
_WAIT_S = 20.0
# After its deadline a transfer drains; then its record is reported.
_GRACE_S = 20.0
_LOOK_S = 0.05
# Agents report an end within half a second.
_TOLD_S = 5.0


def move(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="daemon#agent/region:blocks, e.g. /run/kvxfer#a/kv:0-7,9")
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The destination, written the same way.")],
    push: Annotated[
        bool,
        typer.Option("--push", help="The source's agent writes; by default the destination's agent reads."),
    ] = False,
    layers: Annotated[str, typer.Option(metavar="FIRST:STOP", help="Move only these layers.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Both ends have ended by then.")] = 30.0,
    priority: Annotated[int, typer.Option(metavar="N", min=0, max=255, help="0 goes first.")] = 0,
    context: Annotated[str, typer.Option(metavar="REQUEST", help="The request that it belongs to.")] = "",
    daemon: DaemonOption = "",
    src_token_file: Annotated[
        str, typer.Option(metavar="FILE", help="Token of the source's daemon. Default: KVXFER_TOKEN_FILE.")
    ] = "",
    dst_token_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="Token of the destination's daemon. Default: KVXFER_TOKEN_FILE."),
    ] = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Move blocks from a region at one daemon to a region at another; status 1 when it fails.

    A place is daemon#agent/region:blocks. Without daemon#, the daemon is --daemon; /region is a region of the
    daemon's own agent, or memory handed over to it; without :blocks, all blocks are moved. The command grants
    the lease that the transfer needs, and ends it afterwards.

    kvxfer move prefill-0/kv:0-7 decode-0/kv:8-15

    kvxfer move http://10.0.0.7:7380#prefill-0/kv:0-7 decode-0/kv:0-7 --push --timeout-s 5
    """
    source, destination = RegionReference.parse(src), RegionReference.parse(dst)
    wanted = _layers(layers)
    with (
        asking(source.daemon or daemon, src_token_file, ca_file) as at_source,
        asking(destination.daemon or daemon, dst_token_file, ca_file) as at_destination,
    ):
        begin, end = PlacedRegion.find(at_source, source), PlacedRegion.find(at_destination, destination)
        if len(begin.blocks) != len(end.blocks):
            raise invalid(f"{begin.words} cannot go into {end.words}: name the same number at both ends")

        def say(words: str) -> None:
            if not json:
                print(words, flush=True)

        request: Request = {
            "src_blocks": begin.blocks,
            "dst_blocks": end.blocks,
            "layers": wanted,
            "timeout_s": timeout_s,
            "priority": priority,
            "context": context,
        }
        steps = _push if push else _pull
        with steps(begin, end, request, say) as (client, made):
            transfer = _with_both_ends(_ended(client, made, timeout_s), begin.client, end.client)
        if json:
            print_json(transfer)
        else:
            _print(transfer)
        if transfer.state != "done":
            raise typer.Exit(FAILED)


@contextmanager
def _pull(begin: PlacedRegion, end: PlacedRegion, request: Request, say: Say) -> Iterator[tuple[Client, str]]:
    """Makes the destination's agent read, under a lease of the source's agent."""
    from kvxfer.control import schema

    lease = begin.client.grant_lease(
        schema.LeaseRequest(
            agent=begin.agent.id,
            region=begin.region.name,
            blocks=begin.blocks,
            ttl_s=_ttl_s(request),
        )
    )
    try:
        say(f"lease to read {begin.words}")
        made = _create(end, begin, "read", {**request, "lease": lease.token})
        say(f"posted by {end.agent.name} at {end.client.address}, known as {made} until it ends")
        with _cancelled(end.client, made):
            yield end.client, made
    finally:
        revoke_quietly(begin.client, lease.id)


@contextmanager
def _push(begin: PlacedRegion, end: PlacedRegion, request: Request, say: Say) -> Iterator[tuple[Client, str]]:
    """Makes the source's agent write, under a lease of the destination's agent for their session."""
    with right_to_write(end, begin.client, begin.agent, _ttl_s(request)) as token:
        say(f"lease to write {end.words}")
        # Not by its address: a session that the other end began has no address.
        made = _create(begin, end, "write", {**request, "lease": token}, end.agent.id)
        say(f"posted by {begin.agent.name} at {begin.client.address}, known as {made} until it ends")
        with _cancelled(begin.client, made):
            yield begin.client, made


@contextmanager
def _cancelled(client: Client, transfer: str) -> Iterator[None]:
    """Cancels the transfer if the block raises."""
    try:
        yield
    except BaseException:
        from kvxfer.control.client.client_error import ControlError

        try:
            client.cancel_transfer(transfer)
        except ControlError as error:
            print(f"kvxfer: {transfer} was not cancelled: {error}", file=sys.stderr)
        raise


def _create(
    by: PlacedRegion, other: PlacedRegion, verb: str, request: Request, remote_agent: str = ""
) -> str:
    from kvxfer.control import schema

    asked = {
        "agent": by.agent.id,
        "verb": verb,
        "region": by.region.name,
        "remote_agent": remote_agent or other.agent.address or other.agent.id,
        "remote_region": other.region.name,
        **{name: value for name, value in request.items() if value is not None},
    }
    return by.client.create_transfer(schema.TransferRequest.model_validate(asked)).id


def _ended(client: Client, transfer: str, timeout_s: float) -> schema.Transfer:
    until_s = time.monotonic() + timeout_s + _GRACE_S
    found = client.get_transfer(transfer, wait_s=min(_WAIT_S, timeout_s + 1))
    while found.state == "pending" and time.monotonic() < until_s:
        found = client.get_transfer(transfer, wait_s=_WAIT_S)
    return found


def _with_both_ends(transfer: schema.Transfer, *clients: Client) -> schema.Transfer:
    """Returns a transfer with the end that another daemon knows, if that is reported in time."""
    from kvxfer.control.client.client_error import ControlError

    until_s = time.monotonic() + _TOLD_S
    while transfer.source is None or transfer.destination is None:
        for client in clients:
            try:
                told = client.get_transfer(transfer.id)
            except ControlError:
                continue  # the end is not reported yet; the bytes have moved
            known = {"source": transfer.source or told.source}
            known["destination"] = transfer.destination or told.destination
            # Its poster's daemon may not know yet how other daemons call it.
            transfer = transfer.model_copy(update={**known, "id": told.id})
        is_unposted = transfer.id == transfer.made_id and transfer.state != "done"
        if is_unposted or time.monotonic() > until_s:
            break
        time.sleep(_LOOK_S)
    return transfer


def _print(transfer: schema.Transfer) -> None:
    print("\n".join(lines_of(transfer)))
    us = took_us(transfer)
    if transfer.state == "done" and us:
        print(f"moved {in_bytes(transfer.nbytes)} in {in_time(us)}: {in_bytes(transfer.nbytes / us * 1e6)}/s")


def _ttl_s(request: Request) -> float:
    """Returns a lease's duration: it outlasts its transfer, and is revoked after it."""
    return float(str(request["timeout_s"])) + _GRACE_S


def _layers(text: str) -> list[int] | None:
    if not text:
        return None
    first, colon, stop = text.partition(":")
    if not colon or not first.isdigit() or not stop.isdigit() or int(first) >= int(stop):
        raise invalid(f"--layers must be FIRST:STOP, e.g. 0:16, not {text!r}")
    return [int(first), int(stop)]
