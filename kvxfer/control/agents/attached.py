"""An attached agent, as it reported itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Attached:
    """An attached agent, as it last reported itself. One object while it is attached; read only.

    Attributes
    ----------
    name, incarnation, address
        As in directories; the incarnation in hexadecimal digits.
    pid, uid
        Of its process, as the kernel reports them.
    host, version
        As the agent reported them.
    may
        What the daemon may do with it (`AgentOptions.daemon_may`).
    options
        Its `AgentOptions` as a JSON object, without the secret.
    attached_at
        Seconds since 1970.
    regions
        Objects with ``id``, ``name``, ``kind`` ("pool", "foreign", "gpu"), ``num_blocks``, ``nbytes``,
        ``layout`` (`KVLayout` as its JSON document; None once the layouts before it fill half a MiB) and
        ``notes``.
    peers
        One for each session: ``session`` (number), ``name``, ``incarnation``, ``address``, ``is_ours``,
        ``rails``, ``paths``, ``notes``, ``regions`` and ``region_ids`` (names and numbers of the first 16),
        ``num_regions``.
    leases
        Leases that it granted and that have not ended: ``lease`` (an id, no token), ``holder``, ``peer`` (its
        session, or None), ``region`` (number), ``mode``, ``num_blocks``, ``state``, and ``seconds_left`` at
        the time of the report. The agent does not report heartbeats, which start a lease's time anew.
    stats
        `Agent.stats` without the programs and the peers.
    rails_off
        Transports whose rails the agent has switched off.
    limits
        Limits of its peers: ``name``, ``max_bytes_per_s`` (0: any rate), ``least_priority``.
    draining, draining_until_ns
        Whether the agent was asked to drain, and until when, by CLOCK_MONOTONIC.
    num_regions, num_peers, num_leases
        The full numbers; of very long lists the agent reports only the first entries.
    leases_ended
        How many leases have ended since the agent was made, by how (`kvxfer.LeaseState`). The agent looks
        every half a second, so leases that begin and end between two looks are not counted.
    clock_offset_ns
        What to add to its CLOCK_MONOTONIC for nanoseconds since 1970.
    records_dropped
        Records of transfers that it has dropped since it was made, because the daemon did not read fast
        enough.
    """

    name: str
    incarnation: str
    address: str
    pid: int
    uid: int
    host: str
    version: str
    may: tuple[str, ...]
    options: Mapping[str, Any]
    attached_at: float
    regions: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    leases: list[dict[str, Any]] = field(default_factory=list)
    rails_off: list[str] = field(default_factory=list)
    limits: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    draining: bool = False
    draining_until_ns: int | None = None
    num_regions: int = 0
    num_peers: int = 0
    num_leases: int = 0
    leases_ended: dict[str, int] = field(default_factory=dict)
    clock_offset_ns: int = 0
    records_dropped: int = 0
