"""How far a run is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` steps, and what happens now or has just happened."""

    done: int
    total: int
    words: str
