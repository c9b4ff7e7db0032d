"""``kvxfer move``: blocks of a region at one daemon into a region at another, by REST alone."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.cli.asking import CaFileOption, DaemonOption, JsonOption, asking, in_bytes, in_time, print_json
from kvxfer.cli.control import told_of, took_us
from kvxfer.errors import UsageError, invalid

if TYPE_CHECKING:
    from kvxfer.control import schema
    from kvxfer.control.client import Client

Request = dict[str, object]
Say = Callable[[str], None]

# The transfer ended, and not well; 2 is "could not run as asked" (app.py).
_FAILED = 1
_MOST_BLOCKS = 65536
# The daemon answers by then that it has not ended, and is asked again.
_WAIT_S = 20.0
# After its deadline a transfer drains; then its record is told.
_GRACE_S = 20.0
_LOOK_S = 0.05
# Agents tell of an end within half a second.
_TOLD_S = 2.0
_BLOCKS = re.compile(r"^(?P<place>.+):(?P<blocks>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)$")


@dataclass(frozen=True, slots=True)
class Place:
    """One end as it is written: ``[daemon#]agent/region[:blocks]``."""

    daemon: str
    name: str
    blocks: tuple[int, ...] | None

    @classmethod
    def parse(cls, text: str) -> Place:
        """Reads one; blocks are e.g. ``0-7,12``, and all of the region's where they are left out."""
        daemon, mark, rest = text.partition("#")
        if not mark:
            daemon, rest = "", text
        found = _BLOCKS.match(rest)
        name, blocks = (rest, None) if found is None else (found["place"], _numbers(found["blocks"]))
        if "/" not in name:
            raise invalid(f"{text!r} is no place: write [daemon#]agent/region[:blocks], e.g. decode-0/kv:0-7")
        return cls(daemon, name, blocks)


@dataclass(frozen=True, slots=True)
class End:
    """One end as its daemon knows it."""

    client: Client
    agent: schema.Agent
    region: schema.Region
    blocks: list[int]

    @classmethod
    def find(cls, client: Client, place: Place) -> End:
        """Finds the agent and its region; ``/region`` is one of the daemon's own."""
        node = client.get_node()
        agents = {agent.id: agent for agent in client.agents()}
        own = agents[node.agent].name if node.agent in agents else ""
        found = [
            (agents[region.agent], region)
            for region in client.regions()
            if region.agent in agents and place.name in _names(agents[region.agent], region, own)
        ]
        if not found:
            raise invalid(f"{client.place} knows no region {place.name!r}: kvxfer regions lists them")
        if len(found) > 1:
            raise invalid(f"{place.name!r} is {len(found)} regions: name the agent by its id (kvxfer agents)")
        agent, region = found[0]
        blocks = list(range(region.num_blocks) if place.blocks is None else place.blocks)
        if not 0 < len(blocks) <= _MOST_BLOCKS:
            raise invalid(f"{place.name} is {len(blocks)} blocks; one transfer moves 1 to {_MOST_BLOCKS}")
        return cls(client, agent, region, blocks)

    @property
    def words(self) -> str:
        """What it is called in messages."""
        return f"{len(self.blocks)} blocks of {self.region.name} of {self.agent.name}"


def move(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="daemon#agent/region:blocks, e.g. /run/kvxfer#a/kv:0-7,9")
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The same of where they go.")],
    push: Annotated[
        bool, typer.Option("--push", help="The source's agent writes; otherwise the destination's reads.")
    ] = False,
    layers: Annotated[str, typer.Option(metavar="FIRST:STOP", help="These layers alone.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Both ends are final by then.")] = 30.0,
    priority: Annotated[int, typer.Option(min=0, max=255, help="0 goes first.")] = 0,
    context: Annotated[str, typer.Option(help="Whose request it is.")] = "",
    daemon: DaemonOption = "",
    src_token_file: Annotated[
        str, typer.Option(metavar="FILE", help="Token of the source's daemon. Default: KVXFER_TOKEN_FILE.")
    ] = "",
    dst_token_file: Annotated[
        str, typer.Option(metavar="FILE", help="Of the destination's. Default: KVXFER_TOKEN_FILE.")
    ] = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Move blocks from a region at one daemon to a region at another; status 1 when it fails.

    A place is daemon#agent/region:blocks. Without daemon# it is at --daemon; /region is one of the daemon's
    own, as memory is that was handed over; without :blocks all of the region's are meant.
    The lease that it needs is granted for it, and ends with it.
    """
    source, destination = Place.parse(src), Place.parse(dst)
    wanted = _layers(layers)
    with (
        asking(source.daemon or daemon, src_token_file, ca_file) as at_source,
        asking(destination.daemon or daemon, dst_token_file, ca_file) as at_destination,
    ):
        begin, end = End.find(at_source, source), End.find(at_destination, destination)
        if len(begin.blocks) != len(end.blocks):
            raise invalid(f"{begin.words} cannot go into {end.words}: name as many of both")

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
            raise typer.Exit(_FAILED)


@contextmanager
def _pull(begin: End, end: End, request: Request, say: Say) -> Iterator[tuple[Client, str]]:
    """Has the destination's agent read, under a lease of the source's."""
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
        say(f"transfer {made} of {end.agent.name}'s at {end.client.place}")
        with _cancelled(end.client, made):
            yield end.client, made
    finally:
        _revoke(begin.client, lease.id)


@contextmanager
def _push(begin: End, end: End, request: Request, say: Say) -> Iterator[tuple[Client, str]]:
    """Has the source's agent write, under a lease of the destination's for the session of both."""
    from kvxfer.control import schema

    lease = end.client.grant_lease(
        schema.LeaseRequest(
            agent=end.agent.id,
            region=end.region.name,
            blocks=end.blocks,
            mode="write",
            holder=_session(begin, end, request),
            ttl_s=_ttl_s(request),
        )
    )
    try:
        say(f"lease to write {end.words}")
        # Not by its address, which a session that the other end began does not have.
        made = _create(begin, end, "write", {**request, "lease": lease.token}, end.agent.id)
        say(f"transfer {made} of {begin.agent.name}'s at {begin.client.place}")
        with _cancelled(begin.client, made):
            yield begin.client, made
    finally:
        _revoke(end.client, lease.id)


@contextmanager
def _cancelled(client: Client, transfer: str) -> Iterator[None]:
    """Cancels the transfer where what is done about it does not come to its end."""
    try:
        yield
    except BaseException:
        from kvxfer.control.client_error import ControlError

        try:
            client.cancel_transfer(transfer)
        except ControlError as error:
            print(f"kvxfer: {transfer} was not cancelled: {error}", file=sys.stderr)
        raise


def _create(by: End, other: End, verb: str, request: Request, remote_agent: str = "") -> str:
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


def _session(begin: End, end: End, request: Request) -> int:
    """Returns the number that the destination's agent has for its newest session with the source's."""
    from kvxfer.control import schema

    until_s = time.monotonic() + float(str(request["timeout_s"]))
    if (found := _newest_session(begin, end)) is None:
        asked = schema.ConnectRequest(remote_agent=end.agent.address or end.agent.id)
        begin.client.connect_agent(begin.agent.id, asked)
    while found is None:
        if time.monotonic() > until_s:
            raise UsageError(
                f"{end.agent.name} did not tell of a session with {begin.agent.name}", code="deadline"
            )
        time.sleep(_LOOK_S)
        found = _newest_session(begin, end)
    return found


def _newest_session(begin: End, end: End) -> int | None:
    found = [peer.session for peer in end.client.peers(end.agent.id) if peer.id == begin.agent.id]
    return found[-1] if found else None


def _ended(client: Client, transfer: str, timeout_s: float) -> schema.Transfer:
    until_s = time.monotonic() + timeout_s + _GRACE_S
    found = client.get_transfer(transfer, wait_s=min(_WAIT_S, timeout_s + 1))
    while found.state == "pending" and time.monotonic() < until_s:
        found = client.get_transfer(transfer, wait_s=_WAIT_S)
    return found


def _with_both_ends(transfer: schema.Transfer, *clients: Client) -> schema.Transfer:
    """Returns a transfer with the end that another daemon knows; one that is not told in time stays out."""
    from kvxfer.control.client_error import ControlError

    until_s = time.monotonic() + _TOLD_S
    while transfer.source is None or transfer.destination is None:
        for client in clients:
            try:
                told = client.get_transfer(transfer.id)
            except ControlError:
                continue  # the end was not told yet; and what moved has moved
            ends = {"source": transfer.source or told.source}
            ends["destination"] = transfer.destination or told.destination
            transfer = transfer.model_copy(update=ends)
        if transfer.id == transfer.made_id or time.monotonic() > until_s:
            break
        time.sleep(_LOOK_S)
    return transfer


def _revoke(client: Client, lease: str) -> None:
    from kvxfer.control.client_error import ControlError

    try:
        client.revoke_lease(lease)
    except ControlError as error:
        if error.code not in ("not-found", "lease-ended"):
            print(f"kvxfer: lease {lease} was not revoked, and runs out: {error}", file=sys.stderr)


def _print(transfer: schema.Transfer) -> None:
    print("\n".join(told_of(transfer)))
    us = took_us(transfer)
    if transfer.state == "done" and us:
        print(f"moved {in_bytes(transfer.nbytes)} in {in_time(us)}: {in_bytes(transfer.nbytes / us * 1e6)}/s")


def _names(agent: schema.Agent, region: schema.Region, own: str) -> set[str]:
    """Returns how a region may be written; the agent of handed memory is called after the daemon's own."""
    names = {f"{agent.name}/{region.name}", f"{agent.id}/{region.name}"}
    is_own = own and (agent.name == own or agent.name.startswith(f"{own}/"))
    return names | {f"/{region.name}"} if is_own else names


def _ttl_s(request: Request) -> float:
    """A lease outlasts its transfer, and is revoked when that has ended."""
    return float(str(request["timeout_s"])) + _GRACE_S


def _numbers(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or len(found) + len(numbers) > _MOST_BLOCKS:
            raise invalid(f"blocks {part!r} are none, or more than {_MOST_BLOCKS}")
        found.extend(numbers)
    return tuple(found)


def _layers(text: str) -> list[int] | None:
    if not text:
        return None
    first, colon, stop = text.partition(":")
    if not colon or not first.isdigit() or not stop.isdigit() or int(first) >= int(stop):
        raise invalid(f"--layers is FIRST:STOP, e.g. 0:16, not {text!r}")
    return [int(first), int(stop)]
