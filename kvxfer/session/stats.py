"""Statistics: an agent's counters since it was made, and what it holds for each peer."""

from __future__ import annotations

from typing import TypedDict

# By resource ("bytes", "mapped bytes", "descriptors", "fence slots", "events", "message bytes"): the amount
# held, and the limit.
Budget = dict[str, tuple[int, int]]

# Histogram of gate holds by upper bound in milliseconds (0.125, 0.25, 0.5, … 16, inf); each hold counts once.
GateHolds = dict[float, int]


class PeerStats(TypedDict):
    """One open session: what this agent holds because of its peer."""

    name: str
    budget: Budget


class CoreStats(TypedDict):
    """Native counters over all peers since the agent was made; ``open`` and held values are current.

    ``gate_longest_hold_ns`` is the longest processor time for which one thread held the agent's progress
    gate, which blocks all other progress. ``gate_holds`` counts all holds. Both are exact with the option
    ``meter_gate``. Without it, a hold of more than 0.1 ms counts with its time by the clock, unless its
    thread is known to have used less processor time. ``strangers`` is the budget shared by all connections
    that have not authenticated yet. ``rails_redialled`` counts rails that came back after they were lost
    while others of their session went on, or after they had not come up. ``messages_in`` counts received
    messages, read or not. ``records_dropped`` counts records of ended transfers that were replaced by newer
    ones before the reader took them.
    """

    transfers_open: int
    transfers_done: int
    transfers_failed: int
    bytes_in: int
    pieces_in: int
    pieces_sent: int
    pieces_redone: int
    fences_stale: int
    frames_refused: int
    rails_lost: int
    rails_redialled: int
    messages_in: int
    messages_sent: int
    events_dropped: int
    notifications_dropped: int
    messages_dropped: int
    records_dropped: int
    gate_longest_hold_ns: int
    gate_holds: GateHolds
    strangers: Budget


class AgentStats(CoreStats):
    """Adds the number of cached ``programs``, and ``peers``: a row for each open session, newest last."""

    programs: int
    peers: list[PeerStats]
