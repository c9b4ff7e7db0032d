"""``kvxfer pages``: lists pages of the host pool; parks, fetches, pins and drops them."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.cli.asking import (
    FAILED,
    CaFileOption,
    DaemonOption,
    JsonOption,
    LimitOption,
    TokenFileOption,
    asking,
    in_bytes,
    lists_alone,
    print_json,
    print_rows,
)
from kvxfer.cli.region_reference import PlacedRegion, RegionReference
from kvxfer.cli.right_to_write import right_to_write
from kvxfer.errors import invalid

if TYPE_CHECKING:
    from kvxfer.control import schema
    from kvxfer.control.client.rest_client import Client

app = typer.Typer(invoke_without_command=True, epilog="kvxfer pages --tenant red\n\nkvxfer pages --pool")

RegionArgument = Annotated[
    str, typer.Argument(metavar="REGION", help="agent/region:blocks, one block per key.")
]
KeysArgument = Annotated[list[str], typer.Argument(metavar="KEY...", help="One key per page.")]
ModelOption = Annotated[str, typer.Option(help="The pages' model; each model has its own keys.")]
RevisionOption = Annotated[str, typer.Option(help="The model's revision.")]
TenantOption = Annotated[str, typer.Option(help="The pages' tenant.")]
LayoutOption = Annotated[
    str,
    typer.Option(
        metavar="DIGEST",
        help="The layout that parking answered, or its beginning. Needed if a key is parked in two layouts.",
    ),
]
TimeoutOption = Annotated[float, typer.Option(min=0.001, help="How long copying may take.")]
ContextOption = Annotated[str, typer.Option(metavar="REQUEST", help="The request that it belongs to.")]

# After its deadline a copy drains.
_GRACE_S = 20.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


@app.callback()
def pages(
    context: typer.Context,
    pool: Annotated[bool, typer.Option("--pool", help="Show how full the pool is.")] = False,
    tenant: TenantOption = "",
    limit: LimitOption = 100,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """List the pages of the host pool, or say how full it is; park, fetch, pin and drop pages."""
    if not lists_alone(context):
        return
    with asking(daemon, token_file, ca_file) as client:
        if pool:
            print_rows(
                client.list_pools().items,
                [
                    ("POOL", lambda row: row.name),
                    ("STATE", lambda row: f"{row.state}: {row.why}" if row.why else row.state),
                    ("USED", lambda row: f"{in_bytes(row.used_nbytes)} of {in_bytes(row.nbytes)}"),
                    ("PINNED", lambda row: in_bytes(row.pinned_nbytes)),
                    ("PAGES", lambda row: row.pages),
                    ("LEASES", lambda row: row.leases),
                    ("HITS", lambda row: row.hits_total),
                    ("MISSES", lambda row: row.misses_total),
                    ("EVICTED", lambda row: row.evicted_total),
                ],
                as_json=json,
                nothing="this daemon keeps no pages: start it with kvxfer serve --pool-gib",
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
                ("TIER", lambda row: row.tier),
                ("SIZE", lambda row: in_bytes(row.nbytes)),
                ("FETCHES", lambda row: row.fetches),
            ],
            as_json=json,
            nothing="no page is kept",
        )


@app.command(epilog="kvxfer pages park prefill-0/kv:7,9 key-a key-b --model llama --pin")
def park(
    place: RegionArgument,
    keys: KeysArgument,
    model: ModelOption,
    revision: RevisionOption = "",
    tenant: TenantOption = "",
    lease: Annotated[
        str, typer.Option(metavar="TOKEN", help="Token of a lease. Default: the agent is asked for a lease.")
    ] = "",
    pin: Annotated[bool, typer.Option("--pin", help="Keep the pages from being evicted.")] = False,
    timeout_s: TimeoutOption = 30.0,
    context: ContextOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Copy blocks of an agent's region into the pool, one per key; then they can be fetched."""
    from kvxfer.control import schema

    wanted = RegionReference.parse(place)
    with asking(wanted.daemon or daemon, token_file, ca_file) as client:
        source = PlacedRegion.find(client, wanted)
        asked = schema.ParkRequest(
            model=model,
            revision=revision,
            tenant=tenant,
            keys=keys,
            agent=source.agent.id,
            region=source.region.name,
            blocks=source.blocks,
            lease=lease or None,
            pin=pin,
            timeout_s=timeout_s,
            context=context,
        )
        _print(client.park_pages(asked), json)


@app.command(epilog="kvxfer pages fetch decode-0/kv:0-1 key-a key-b --model llama")
def fetch(
    place: RegionArgument,
    keys: KeysArgument,
    model: ModelOption,
    layout: LayoutOption = "",
    revision: RevisionOption = "",
    tenant: TenantOption = "",
    lease: Annotated[
        str,
        typer.Option(
            metavar="TOKEN", help="Token of a lease to write. Default: one is granted for this command."
        ),
    ] = "",
    notify: Annotated[str, typer.Option(metavar="TAG", help="Tag that the agent expects.")] = "",
    timeout_s: TimeoutOption = 30.0,
    context: ContextOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Copy pages into blocks of an agent's region: all of them, or none if one is missing."""
    from kvxfer.control import schema

    wanted = RegionReference.parse(place)
    with asking(wanted.daemon or daemon, token_file, ca_file) as client:
        destination = PlacedRegion.find(client, wanted)
        which = _which(client, keys, layout, model, revision, tenant)
        # An expected tag also permits the write.
        with nullcontext(lease) if lease or notify else _right(destination, timeout_s) as token:
            asked = schema.FetchRequest(
                **which.model_dump(),
                agent=destination.agent.id,
                region=destination.region.name,
                blocks=destination.blocks,
                lease=token or None,
                notify=notify,
                timeout_s=timeout_s,
                context=context,
            )
            _print(client.fetch_pages(asked), json)


@app.command(
    epilog="kvxfer pages pin key-a key-b --model llama\n\nkvxfer pages pin key-a --model llama --undo"
)
def pin(
    keys: KeysArgument,
    model: ModelOption,
    undo: Annotated[bool, typer.Option("--undo", help="Let the pages be evicted again.")] = False,
    layout: LayoutOption = "",
    revision: RevisionOption = "",
    tenant: TenantOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Keep pages from being evicted; status 1 if one is missing."""
    with asking(daemon, token_file, ca_file) as client:
        which = _which(client, keys, layout, model, revision, tenant)
        _print(client.unpin_pages(which) if undo else client.pin_pages(which), json)


@app.command(epilog="kvxfer pages drop key-a key-b --model llama --tenant red")
def drop(
    keys: KeysArgument,
    model: ModelOption,
    layout: LayoutOption = "",
    revision: RevisionOption = "",
    tenant: TenantOption = "",
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Drop pages, with a fence: afterwards they are not read any more. Status 1 if one is missing."""
    with asking(daemon, token_file, ca_file) as client:
        _print(client.drop_pages(_which(client, keys, layout, model, revision, tenant)), json)


def _right(destination: PlacedRegion, timeout_s: float) -> AbstractContextManager[str]:
    """Returns a lease to write for the daemon's own agent, which owns the pool."""
    client = destination.client
    own = client.get_node().agent
    writer = next((agent for agent in client.agents() if agent.id == own), None)
    if writer is None:
        raise invalid(f"{client.address} has no own agent, and so keeps no pages")
    return right_to_write(destination, client, writer, timeout_s + _GRACE_S)


def _which(
    client: Client, keys: list[str], layout: str, model: str, revision: str, tenant: str
) -> schema.PagesRequest:
    """Returns the meant pages; the layout is looked up by its beginning, or only by the keys."""
    from kvxfer.control import schema

    if _DIGEST.fullmatch(layout) is None:
        wanted: tuple[Any, ...] = (model, revision, tenant)
        found = {
            page.layout
            for page in client.pages(tenant or None)
            if page.key in keys
            and (page.model, page.revision, page.tenant) == wanted
            and page.layout.startswith(layout)
        }
        if len(found) != 1:
            words = f"parked in {len(found)} layouts" if found else "not parked"
            raise invalid(
                f"these keys are {words} for model {model!r}, revision {revision!r}, tenant {tenant!r}"
                f"{f', layout {layout}...' if layout else ''}: kvxfer pages lists them, --layout names one"
            )
        layout = found.pop()
    return schema.PagesRequest(model=model, revision=revision, tenant=tenant, keys=keys, layout=layout)


def _print(done: schema.PagesDone, as_json: bool) -> None:
    if as_json:
        print_json(done)
    else:
        print_rows(
            done.pages,
            [("KEY", lambda row: row.key), ("STATE", lambda row: row.state)],
            as_json=False,
            nothing="no page",
        )
        print(f"layout {done.layout}" + (f", {in_bytes(done.nbytes)}" if done.nbytes else ""))
    if any(page.state in ("missing", "gone") for page in done.pages):
        raise typer.Exit(FAILED)
