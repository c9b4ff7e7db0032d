"""A seeded plan of how transports misbehave within their contract."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvxfer.errors import invalid


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Rates of faults between 0 and 1, for `AgentOptions.faults`. One seed, one sequence of faults.

    Attributes
    ----------
    seed
        Print it where a test fails.
    again
        Of posts: takes a part and asks to come again.
    delay
        Of completions: held back for some rounds.
    reorder
        Of completions: changes places with another.
    fail
        Of pieces: reported as failed by the rail, whether or not the bytes moved.
    down_after
        Pieces until the rail of the last one dies; 0 for never.
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
                raise invalid(f"fault {name} is a rate between 0 and 1, not {getattr(self, name)}")
        if self.seed < 0 or self.down_after < 0:
            raise invalid("seed and down_after are 0 or more")

    def __str__(self) -> str:
        """Returns the form that `AgentOptions.faults` takes."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in values.items()
        )

    @property
    def loses_rails(self) -> bool:
        """Whether transfers may fail because of it. Without, all of them must end well."""
        return bool(self.fail or self.down_after)
