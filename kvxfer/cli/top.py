"""``kvxfer top``: what a node does, on a screen that is redrawn each second."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.cli.asking import (
    CaFileOption,
    DaemonOption,
    JsonOption,
    TokenFileOption,
    ago,
    asking,
    in_bytes,
    in_time,
    plain,
    print_json,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvxfer.control import schema
    from kvxfer.control.client.rest_client import Client
    from kvxfer.control.transfers.live_rates import LinkRate

_MOST_ENDED = 12
_MOST_OPEN = 12
_MOST_NAMES = 10_000


class Watch:
    """The content of events, which its own thread reads."""

    def __init__(self, client: Client) -> None:
        from kvxfer.control.transfers.live_rates import LiveRates

        self._client = client
        self._lock = threading.Lock()
        self._rates = LiveRates(time.monotonic())
        self._missed = 0
        self._ended: deque[schema.Event] = deque(maxlen=_MOST_ENDED)
        self._names: dict[str, str] = {}
        #: Why the event stream has ended; "" while it is open.
        self.error = ""
        threading.Thread(target=self._run, name="kvxfer-top", daemon=True).start()

    def _run(self) -> None:
        from kvxfer.control.client.client_error import ControlError
        from kvxfer.control.client.client_events import Missed

        try:
            for event in self._client.events(topic=["transfers"]):
                with self._lock:
                    if isinstance(event, Missed):
                        self._missed += event.num_indexes
                    elif event.topic != "transfers.created":
                        self._take(event)
        except ControlError as error:
            self.error = str(error)
        except RuntimeError:
            pass  # the client was closed

    def _take(self, event: schema.Event) -> None:
        if (peer := str(event.data.get("peer_name", ""))) and len(self._names) < _MOST_NAMES:
            self._names[str(event.data["peer"])[:16]] = peer
        if event.topic == "transfers.done":
            self._rates.add(event.data, time.monotonic())
        if event.data.get("role") != "source" or event.topic != "transfers.done":
            self._ended.appendleft(event)

    def names(self) -> dict[str, str]:
        """Returns the names of peers, which may be attached elsewhere, by their ids' digits in a link."""
        with self._lock:
            return dict(self._names)

    def look(self) -> tuple[list[LinkRate], list[schema.Event], int]:
        """Returns rates, the last ended transfers, and the number of missed events."""
        with self._lock:
            return self._rates.links(time.monotonic()), list(self._ended), self._missed


def top(
    interval_s: Annotated[float, typer.Option(min=0.1, help="How often the screen is redrawn.")] = 1.0,
    count: Annotated[
        int, typer.Option(metavar="N", min=0, help="End after drawing it N times; 0: on Ctrl-C.")
    ] = 0,
    daemon: DaemonOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    json: JsonOption = False,
) -> None:
    """Watch a node: agents, links with their rates, transfers, leases and the pool.

    kvxfer top

    kvxfer top --json --count 10 --interval-s 5
    """
    with asking(daemon, token_file, ca_file) as client:
        # A wrong address or token is reported before the screen is drawn.
        client.get_node()
        watch = Watch(client)
        if json or not sys.stdout.isatty():
            _print_plain(client, watch, interval_s, count or (0 if json else 1), as_json=json)
            return
        from rich.live import Live

        with Live(screen=True, auto_refresh=False) as live:
            drawn = 0
            while not count or drawn < count:
                live.update(_screen(_look(client, watch)), refresh=True)
                drawn += 1
                time.sleep(interval_s)


def _print_plain(client: Client, watch: Watch, interval_s: float, count: int, *, as_json: bool) -> None:
    """Prints the screen's content as lines."""
    from kvxfer.cli.asking import console

    printed = 0
    while not count or printed < count:
        time.sleep(interval_s)  # before the first, too: rates need some time
        found = _look(client, watch)
        if as_json:
            print_json(found)
        else:
            console().print(_screen(found))
        printed += 1


def _look(client: Client, watch: Watch) -> dict[str, Any]:
    """Returns the daemon's answers and the content of its events; failed answers are left out."""
    from kvxfer.control.client.client_error import ControlError

    links, ended, missed = watch.look()
    found: dict[str, Any] = {"at_s": time.time(), "missed_events": missed, "error": watch.error}
    found["links"] = [link._asdict() for link in links]
    found["ended"] = [event.model_dump(mode="json") for event in ended]
    parts: dict[str, Callable[[], Any]] = {
        "node": client.get_node,
        "drain": client.get_drain,
        "agents": lambda: list(client.agents()),
        "recent": lambda: client.list_transfers(limit=_MOST_ENDED).items,
        "open": lambda: client.list_open_transfers(limit=_MOST_OPEN).items,
        "pools": lambda: client.list_pools().items,
    }
    for name, ask in parts.items():
        try:
            told = ask()
        except ControlError as error:
            found["error"] = str(error)
            if error.status == 0:
                break
            continue
        found[name] = (
            [each.model_dump(mode="json") for each in told]
            if isinstance(told, list)
            else told.model_dump(mode="json")
        )
    names = watch.names()
    names |= {agent["id"][:16]: agent["name"] for agent in found.get("agents", ())}
    found["names"] = names
    return found


def _screen(found: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    def name_of(id_: str) -> str:
        return str(found["names"].get(id_) or id_[:8])

    node, drain = found.get("node", {}), found.get("drain", {})
    head = Text.assemble(
        (f"{plain(node.get('node', '?'))}  ", "bold"),
        f"kvxfer {node.get('version', '?')}, up {ago(node['started_at_s'])}" if node else "",
    )
    if drain.get("draining"):
        head.append(f"  drains: {drain['running']} run", "yellow")
    if found["missed_events"]:
        head.append(f"  {found['missed_events']} events missed", "yellow")
    parts: list[RenderableType] = [head]
    if found["error"]:
        parts.append(Text(plain(found["error"]), "bold red"))
    parts.append(
        _table(
            "agents",
            ("AGENT", "PID", "REGIONS", "PEERS", "LEASES", ""),
            [
                (
                    *(agent[name] for name in ("name", "pid", "regions", "peers", "leases")),
                    "drains" if agent["draining"] else "",
                )
                for agent in found.get("agents", ())
            ],
        )
    )
    parts.append(
        _table(
            "links, rates over the last seconds",
            ("FROM", "TO", "RATE", "TRANSFERS/S"),
            [
                (
                    name_of(link["source"]),
                    name_of(link["destination"]),
                    in_bytes(link["bytes_per_s"]) + "/s",
                    f"{link['transfers_per_s']:.1f}",
                )
                for link in found["links"]
            ],
        )
    )
    parts.append(
        _table(
            "in flight",
            ("TRANSFER", "STATE", "DONE", "CONTEXT"),
            [
                (
                    each["id"],
                    _state_of(each),
                    f"{in_bytes(_done(each))} of {in_bytes(each['nbytes'])}",
                    each["context"],
                )
                for each in found.get("open", ())
            ],
        )
    )
    parts.append(
        _table(
            "ended",
            ("TRANSFER", "OUTCOME", "AT", "SIZE", "TOOK", "CONTEXT"),
            [
                (
                    each["id"],
                    f"{each['state']} [{each['code']}]" if each["code"] else each["state"],
                    ", ".join(end["agent_name"] for end in _ends(each)),
                    in_bytes(each["nbytes"]),
                    in_time(max((end["ended_after_us"] or 0.0 for end in _ends(each)), default=None)),
                    each["context"],
                )
                for each in found.get("recent", ())
                if each["state"] != "pending"
            ],
        )
    )
    for pool in found.get("pools", ()):
        words = f"{in_bytes(pool['used_nbytes'])} of {in_bytes(pool['nbytes'])}, {pool['pages']} pages"
        parts.append(Text(f"pool {plain(pool['name'])}: {words}, {pool['leases']} leases"))
    return Group(*parts)


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, "bold"), title_justify="left", box=None, pad_edge=False, header_style="dim"
    )
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(plain(value)) for value in row))
    if not rows:
        table.add_row(Text("none", "dim"))
    return table


def _done(transfer: dict[str, Any]) -> int:
    return max((end["nbytes_done"] for end in _ends(transfer)), default=0)


def _state_of(transfer: dict[str, Any]) -> str:
    return next((str(end["state"]) for end in _ends(transfer)), str(transfer["state"]))


def _ends(transfer: dict[str, Any]) -> list[dict[str, Any]]:
    return [transfer[name] for name in ("destination", "source", "expectation") if transfer[name] is not None]
