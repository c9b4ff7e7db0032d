"""The stages of a handover, put together from what its two ends saw. Pure.

Both ends stamp with CLOCK_MONOTONIC, which is common to all processes of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from kvxfer.bench.run.stats import median, percentiles

if TYPE_CHECKING:
    from kvxfer.bench.run.limit import Limit

#: stage -> what it means; times are counted from the end of prefill, so what hides is negative.
STAGES = {
    "post": "transfer posted",
    "first_layer": "first layer in place at decode",
    "last_layer": "last layer in place",
    "notification": "its tag arrived at decode",
    "decode_may_start": "decode has every page and knows it",
}


@dataclass(frozen=True, slots=True)
class Handover:
    """One request's handover; times in nanoseconds of CLOCK_MONOTONIC."""

    nbytes: int
    prefill_end_ns: int
    #: When each layer was released: from then on it could be moved.
    released_ns: list[int]
    #: When each layer was in place at decode.
    arrived_ns: list[int]
    post_ns: int
    notification_ns: int
    decode_may_start_ns: int
    rails: list[str]

    @classmethod
    def of(cls, prefill: dict[str, Any], decode: dict[str, Any]) -> Self:
        """Joins the messages of the two ends."""
        told = {**prefill, **decode}
        return cls(**{field.name: told[field.name] for field in fields(cls)})

    def stages_ms(self) -> dict[str, float]:
        """Returns each stage in milliseconds after the end of prefill."""
        at = {
            "post": self.post_ns,
            "first_layer": min(self.arrived_ns),
            "last_layer": max(self.arrived_ns),
            "notification": self.notification_ns,
            "decode_may_start": self.decode_may_start_ns,
        }
        return {stage: (ns - self.prefill_end_ns) / 1e6 for stage, ns in at.items()}

    def transfer_ns(self) -> int:
        """From the first layer that could be moved to the last one in place."""
        return max(self.arrived_ns) - self.released_ns[0]

    def hidden_share(self) -> float:
        """Share of the layers that were in place when prefill ended."""
        return sum(at <= self.prefill_end_ns for at in self.arrived_ns) / len(self.arrived_ns)

    def ideal_ns(self, limit_gb_per_s: float) -> int:
        """When a mover at the limit's rate, given the same layers at the same times, would be through."""
        at, layer_ns = 0.0, self.nbytes / len(self.released_ns) / limit_gb_per_s
        for released_ns in self.released_ns:
            at = max(at, float(released_ns)) + layer_ns
        return int(at)


def summarize(handovers: list[Handover], limit: Limit) -> dict[str, Any]:
    """Returns the figures of a run, ready for JSON."""
    limits = limit.figures()
    stages = [handover.stages_ms() for handover in handovers]
    ideals = [(one, one.ideal_ns(limits["limit"]["gb_per_s"])) for one in handovers]
    return {
        "total_nbytes": sum(handover.nbytes for handover in handovers),
        "stages_ms": {stage: percentiles(one[stage] for one in stages) for stage in STAGES},
        "transfer_ms": percentiles(handover.transfer_ns() / 1e6 for handover in handovers),
        "gb_per_s": percentiles(handover.nbytes / handover.transfer_ns() for handover in handovers),
        **limits,
        # From the first layer that could be moved to the last one in place, against the same at
        # the limit's rate: what a paced prefill makes both wait for counts for neither.
        "limit_ratio": median((ideal - one.released_ns[0]) / one.transfer_ns() for one, ideal in ideals),
        "limit_last_layer_ms": percentiles((ideal - one.prefill_end_ns) / 1e6 for one, ideal in ideals),
        "hidden_share": median(handover.hidden_share() for handover in handovers),
        "rails": sorted({rail for handover in handovers for rail in handover.rails}),
    }
