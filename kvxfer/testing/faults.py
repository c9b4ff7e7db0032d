"""A seeded plan of transport faults that stay within the contracts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvxfer.errors import invalid


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Rates of faults between 0 and 1, for `AgentOptions.faults`. One seed, one sequence of faults.

    Attributes
    ----------
    seed
        Print it if a test fails.
    again
        Posts that accept a part and return "again".
    delay
        Completions that are delayed for some rounds.
    reorder
        Completions that change places with another.
    fail
        Pieces that the rail reports as failed, whether or not the bytes moved.
    down_after
        Number of pieces after which the rail of the last one dies; 0 for never.
    """

    seed: int = 1
    again: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    fail: float = 0.0
    down_after: int = 0

    def __post_init__(self) -> None:
        for name in ("again", "delay", "reorder", "fail"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise invalid(f"fault {name} must be a rate between 0 and 1, not {getattr(self, name)}")
        if self.seed < 0 or self.down_after < 0:
            raise invalid("seed and down_after must be 0 or more")

    def __str__(self) -> str:
        """Returns the form that `AgentOptions.faults` takes."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in values.items()
        )

    @property
    def loses_rails(self) -> bool:
        """Whether transfers may fail because of it. If not, all of them must succeed."""
        return bool(self.fail or self.down_after)
