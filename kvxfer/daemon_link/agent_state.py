"""What an agent reports to its daemon: its identity, and the sections of its state that have changed."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final

from kvxfer._native import CODES, NativeError, __version__
from kvxfer.daemon_link.frames import MAX_PAYLOAD_NBYTES, VERSION

if TYPE_CHECKING:
    from kvxfer._native import AgentCore
    from kvxfer.directory import Entry
    from kvxfer.options import AgentOptions
    from kvxfer.region import Region
    from kvxfer.session.drain import Drain
    from kvxfer.session.peer_table import PeerTable
    from kvxfer.session.region_table import RegionTable

# If there are more, only the first are reported, with the total: a message is one frame, of a MiB.
_MOST_REGIONS: Final = 64
_MOST_PEERS: Final = 512
_MOST_LEASES: Final = 1024
_MOST_LIMITS: Final = 256
# Limit of layouts that are reported whole; further ones are left out, and are read from the agent's own
# entry.
_MOST_LAYOUTS_NBYTES: Final = 512 << 10
_MOST_NAMES: Final = 16
# How a lease ends: `kvxfer.LeaseState`.
_ENDS: Final = ("expired", "revoked", "peer-lost", "region-gone", "ended")
_MOST_LETTERS: Final = 400
# native/core/lease.h: kBearerBit. A number at or above it gives access to the pages.
_BEARER_BIT: Final = 1 << 62


def hello(entry: Entry, options: AgentOptions) -> dict[str, Any]:
    """Returns an agent's first message."""
    return {
        "t": "hello",
        "v": VERSION,
        "name": entry.name,
        "incarnation": entry.incarnation.hex(),
        "address": entry.address,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "version": __version__,
        "may": list(options.daemon_may),
        "options": _without_secret(options),
    }


def _without_secret(options: AgentOptions) -> dict[str, Any]:
    shown = {name: getattr(options, name) for name in options.__slots__}
    shown["secret"] = None if options.secret is None else "..."
    shown["tls"] = options.tls and options.tls.to_native()  # paths of files, not what is in them
    return {name: _plain(value) for name, value in shown.items()}


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it. Options may be infinite, or numpy's numbers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {_text(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return _text(value)


def _text(value: object) -> str:
    # REST shows it as UTF-8, which has no lone surrogates.
    return str(value).encode("utf-8", "replace").decode()


def lease_id(number: int) -> str:
    """Returns the daemon's id of a lease.

    A bearer's number gives access to pages, so it is not reported.
    """
    if number < _BEARER_BIT:
        return str(number)
    return "b" + blake2b(number.to_bytes(8), digest_size=8).hexdigest()


class AgentState:
    """Sections of one agent's state, and the last reported ones.

    Used by one thread. Raises `NativeError` if native code reports that the agent is closed.
    """

    def __init__(self, core: AgentCore, peers: PeerTable, regions: RegionTable, drain: Drain) -> None:
        self._core = core
        self._peers = peers
        self._regions = regions
        self._drain = drain
        self._reported: dict[str, Any] = {}
        self._described: dict[int, dict[str, Any]] = {}
        self._looked_at: tuple[int, ...] = ()
        # Leases at the last check, and how many have ended since the first check, by kind of end.
        self._held: set[int] = set()
        self._ended = dict.fromkeys(_ENDS, 0)

    def forget(self) -> None:
        """Makes the next report complete, for another daemon or one that was restarted."""
        self._reported.clear()
        self._looked_at = ()

    def may_have_changed(self) -> bool:
        """Returns whether a peer, a region or a lease came or went since the last check; ignores figures."""
        return self._looked_at[:1] != (self._core.num_changes,)

    def changed(self) -> dict[str, Any]:
        """Returns the sections that differ from the last reported ones, and marks them as reported."""
        stats = self._stats()
        # While only transfers go on, nothing else is checked, because peers and regions may be many.
        changes = self._core.num_changes, stats["rails_lost"], stats["rails_redialled"]
        sections = {"stats": stats, **self._draining()}
        if changes != self._looked_at:
            self._looked_at = (
                changes  # set before the check, so that the next check sees changes during this one
            )
            sections |= self._parts()
        found = {}
        for name, value in sections.items():
            compared = [_lasting(row) for row in value] if name == "leases" else value
            if name not in self._reported or self._reported[name] != compared:
                self._reported[name], found[name] = compared, value
        return found and {**found, **_clocks()}

    def now(self) -> dict[str, Any]:
        """Returns the whole present state."""
        return {"stats": self._stats(), **self._draining(), **self._parts(), **_clocks()}

    def peer(self, session: int) -> dict[str, Any] | None:
        """Returns the report of one session; None if it is not open. From any thread."""
        try:
            info = self._core.peer(session)
            if info["state"] != "open":
                return None
            regions = self._core.peer_regions(session)
        except NativeError:
            return None  # lost meanwhile
        peer = self._peers.get(session)
        return {
            "session": session,
            "name": info["name"],
            "incarnation": info["incarnation"].hex(),
            "address": "" if peer is None else peer.address,
            "is_ours": info["is_ours"],
            "rails": list(info["rails"]),
            "paths": _cut(info["paths"]),
            "notes": _cut(info["notes"]),
            "regions": [each["name"] for each in regions[:_MOST_NAMES]],
            "region_ids": [each["id"] for each in regions[:_MOST_NAMES]],
            "num_regions": len(regions),
        }

    # ---- inside -----------------------------------------------------------------------------

    def _draining(self) -> dict[str, Any]:
        until = self._drain.until
        return {
            "draining": until is not None,
            "draining_until_ns": None if until is None else int(min(until, 1e9) * 1e9),
        }

    def _parts(self) -> dict[str, Any]:
        regions = list(self._regions.by_name().values())
        peer_ids = sorted(self._core.peers())
        leases = self._core.leases(_MOST_LEASES + 1)
        self._count_ended({row["lease"] for row in leases})
        return {
            "regions": self._region_report(regions),
            "num_regions": len(regions),
            "peers": [row for peer in peer_ids[:_MOST_PEERS] if (row := self.peer(peer)) is not None],
            "num_peers": len(peer_ids),
            "leases": [_lease(row) for row in leases[:_MOST_LEASES]],
            "num_leases": len(leases),
            "leases_ended": dict(self._ended),
            "rails_off": self._core.rails_off(),
            "limits": [
                {"name": name, "max_bytes_per_s": rate, "least_priority": least}
                for name, rate, least in self._core.peer_limits()[:_MOST_LIMITS]
            ],
        }

    def _count_ended(self, held: set[int]) -> None:
        """Counts the leases that have ended since the last check; misses any that came and went meanwhile."""
        for number in self._held - held:
            try:
                state = self._core.lease_state(number)
            except NativeError as error:
                if error.args[0] != CODES["invalid-argument"]:
                    raise
                state = "ended"  # native code has forgotten how, after many others
            if state in self._ended:
                self._ended[state] += 1
            elif len(held) < 2 * _MOST_LEASES:
                held.add(number)  # it still holds, beyond the listed ones
        self._held = held

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = dict(self._core.stats())
        # JSON keys are text, and JSON has no infinity.
        stats["gate_holds"] = {str(bound): holds for bound, holds in stats["gate_holds"].items()}
        stats["strangers"] = {name: list(pair) for name, pair in stats["strangers"].items()}
        return stats

    def _region_report(self, regions: list[Region]) -> list[dict[str, Any]]:
        before, self._described = self._described, {}
        left_nbytes = _MOST_LAYOUTS_NBYTES
        for region in regions[:_MOST_REGIONS]:
            row = before.get(region.id)
            if row is None:
                row = self._region(region, left_nbytes)
                if row is None:
                    continue
            left_nbytes -= row["layout_nbytes"]
            self._described[region.id] = row
        return list(self._described.values())

    def _region(self, region: Region, left_nbytes: int) -> dict[str, Any] | None:
        encoded = region.layout.to_bytes()
        try:
            kind, notes = self._core.region_kind(region.id), self._core.region_notes(region.id)
        except NativeError:
            return None  # deregistered meanwhile
        return {
            "id": region.id,
            "name": region.name,
            "kind": kind,
            "num_blocks": region.num_blocks,
            "nbytes": region.nbytes,
            "layout": json.loads(encoded) if len(encoded) <= left_nbytes else None,
            "layout_nbytes": len(encoded),
            "notes": _cut(notes),
        }


def fitted(sections: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields messages that together hold these sections, each within one frame; none without sections.

    A section that is too long for a frame is cut to its first rows.
    """
    whole = {"t": "state", **sections}
    if not sections:
        return
    if _fits(whole):
        yield whole
        return
    clocks = {name: sections[name] for name in _clocks()}
    for name, value in sections.items():
        while not _fits({"t": "state", name: value, **clocks}):
            value = value[: len(value) // 2]
        yield {"t": "state", name: value, **clocks}


def _fits(message: Mapping[str, Any]) -> bool:
    return len(json.dumps(message)) <= MAX_PAYLOAD_NBYTES


def _lasting(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a lease's row without its time, which changes with each heartbeat of the holder."""
    return {name: value for name, value in row.items() if name != "seconds_left"}


def _lease(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "lease": lease_id(row["lease"]),
        "holder": row["holder"],
        "peer": row["peer"],
        "region": row["region"],
        "mode": row["mode"],
        "num_blocks": row["num_blocks"],
        "state": row["state"],
        "seconds_left": row["seconds_left"],
    }


def _cut(sentences: list[str]) -> list[str]:
    return [sentence[:_MOST_LETTERS] for sentence in sentences[:_MOST_NAMES]]


def _clocks() -> dict[str, int]:
    return {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
