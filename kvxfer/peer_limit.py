"""What an agent holds peers of one name to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Beyond every link; a rate is a whole number.
MOST_BYTES_PER_S: Final = 1 << 50
LAST_PRIORITY: Final = 255


@dataclass(frozen=True, slots=True)
class PeerLimit:
    """What peers of one name are held to: see `Agent.limit`.

    Attributes
    ----------
    max_bytes_per_s
        Of pages that the agent takes from them; None for any rate.
    least_priority
        The lowest priority number of transfers that the agent posts with them.
    """

    max_bytes_per_s: int | None = None
    least_priority: int = 0
