"""An agent's limits for peers of one name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Faster than any link. A rate is a whole number.
MOST_BYTES_PER_S: Final = 1 << 50
LAST_PRIORITY: Final = 255


@dataclass(frozen=True, slots=True)
class PeerLimit:
    """Limits for the peers of one name: see `Agent.limit`.

    Attributes
    ----------
    max_bytes_per_s
        Rate at which the agent takes pages from them; None for any rate.
    least_priority
        The lowest priority number of transfers that the agent posts with them.
    """

    max_bytes_per_s: int | None = None
    least_priority: int = 0
