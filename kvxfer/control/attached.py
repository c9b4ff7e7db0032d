"""An agent that is attached, as it told of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Attached:
    """An agent that is attached, as it told last. One object from its attachment to its going; read only.

    Attributes
    ----------
    name, incarnation, address
        As in directories; the incarnation in hexadecimal digits.
    pid, uid
        Of its process, as the kernel told them.
    host, version
        As it told them.
    may
        What it does for the daemon (`AgentOptions.daemon_may`).
    options
        Its `AgentOptions` as a JSON object, without the secret.
    attached_at
        Seconds since 1970.
    regions
        Objects with ``id``, ``name``, ``kind`` ("pool", "foreign", "gpu"), ``num_blocks``, ``nbytes``,
        ``layout`` (`KVLayout` as its JSON document; None where those of all others fill half a MiB) and
        ``notes``.
    peers
        One for each session: ``session`` (number), ``name``, ``incarnation``, ``address``, ``is_ours``,
        ``rails``, ``paths``, ``notes``, ``regions`` and ``region_ids`` (names and numbers of the first 16),
        ``num_regions``.
    leases
        Those that it granted and that have not ended: ``lease`` (an id, no token), ``holder``, ``peer`` (its
        session, or None), ``region`` (number), ``mode``, ``num_blocks``, ``state``, and ``seconds_left``
        as of when that was told: heartbeats that start a lease's time anew are not told.
    stats
        `Agent.stats` without the programs and the peers.
    rails_off
        Transports whose rails are switched off there.
    limits
        What peers are limited to: ``name``, ``max_bytes_per_s`` (0: any rate), ``least_priority``.
    draining, draining_until_ns
        Whether it was asked to drain, and until when, by CLOCK_MONOTONIC.
    num_regions, num_peers, num_leases
        How many there are: of very many the first are told.
    leases_ended
        How many have ended since the agent was made, by how (`kvxfer.LeaseState`); those that came and went
        between two looks, half a second apart, are not among them.
    clock_offset_ns
        What to add to its CLOCK_MONOTONIC for nanoseconds since 1970.
    records_dropped
        Records of transfers that it did not tell, since its making: they came faster than they were read.
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
