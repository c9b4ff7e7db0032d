"""What an agent has counted since its making, and what it holds for whom."""

from __future__ import annotations

from typing import TypedDict

# By resource ("bytes", "mapped bytes", "descriptors", "fence slots", "events", "message bytes"): held, and
# how much may be.
Budget = dict[str, tuple[int, int]]

# How many holds of the gate took at most so many milliseconds (0.125, 0.25, 0.5, … 16, inf), and more than
# the bound before.
GateHolds = dict[float, int]


class PeerStats(TypedDict):
    """Of one open session: what its peer makes this agent hold."""

    name: str
    budget: Budget


class CoreStats(TypedDict):
    """Counted by native code: over all peers since the agent's making, but for what is ``open`` or held.

    ``gate_longest_hold_ns`` is the longest time for which nothing else could go on: the processor time for
    which one thread held the agent's progress gate. ``gate_holds`` counts all holds. Both are exact with the
    option ``meter_gate``; without it a hold of more than 0.1 ms by the clock counts with that time, unless
    its thread is known to have used less of the processor. ``strangers`` is the budget that all connections
    share which have proved nothing yet. Of rails that were lost while others of their session carried on, or
    did not come up, ``rails_redialled`` are back. ``messages_in`` have come, whether they were read or not.
    ``records_dropped`` of ended transfers gave way to newer ones before who watches them took them.
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
    """Besides: ``programs`` that are kept, and ``peers``, a row for each open session, the newest last."""

    programs: int
    peers: list[PeerStats]
