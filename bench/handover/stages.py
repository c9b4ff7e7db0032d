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
    "notification": "its tag came (push); prefill may reuse its pages (pull)",
    "decode_may_start": "decode holds every page and knows it",
}


@dataclass(frozen=True, slots=True)
class Handover:
    """One request's handover; times in nanoseconds of CLOCK_MONOTONIC."""

    request: int
    num_tokens: int
    nbytes: int
    prefill_end_ns: int
    #: When each layer could be moved: its release (push), or the post (pull).
    released_ns: list[int]
    #: When each layer was in place at decode.
    arrived_ns: list[int]
    post_ns: int
    notification_ns: int
    decode_may_start_ns: int
    rails: list[str]
    #: Bytes of the request in each layer; they differ where a layer sees a window or keeps a state.
    layers_nbytes: list[int]
    num_pages: int
    #: Bytes that were at decode already and did not move.
    reused_nbytes: int
    #: When the request came, and when decode had room and asked prefill for it.
    arrival_ns: int
    asked_ns: int

    @classmethod
    def of(cls, prefill: dict[str, Any], decode: dict[str, Any]) -> Self:
        """Joins the messages of the two ends. Who posted says when; a pull releases all at its post."""
        told = {**prefill, **decode}
        told.setdefault("released_ns", [told["post_ns"]] * len(told["arrived_ns"]))
        return cls(**{field.name: told[field.name] for field in fields(cls)})

    @property
    def last_layer_ns(self) -> int:
        return max(self.arrived_ns)

    def stages_ms(self) -> dict[str, float]:
        """Returns each stage in milliseconds after the end of prefill."""
        at = {
            "post": self.post_ns,
            "first_layer": min(self.arrived_ns),
            "last_layer": self.last_layer_ns,
            "notification": self.notification_ns,
            "decode_may_start": self.decode_may_start_ns,
        }
        return {stage: (ns - self.prefill_end_ns) / 1e6 for stage, ns in at.items()}

    def transfer_ns(self) -> int:
        """From the first layer that could be moved to the last one in place."""
        return self.last_layer_ns - self.released_ns[0]

    def hidden_share(self) -> float:
        """Share of the bytes that were in place when prefill ended."""
        layers = zip(self.arrived_ns, self.layers_nbytes, strict=True)
        return sum(nbytes for at, nbytes in layers if at <= self.prefill_end_ns) / self.nbytes

    def ideal_ns(self, limit_gb_per_s: float) -> int:
        """When a mover at the limit's rate, given the same layers at the same times, would be through."""
        at = 0.0
        for released_ns, nbytes in zip(self.released_ns, self.layers_nbytes, strict=True):
            at = max(at, float(released_ns)) + nbytes / limit_gb_per_s
        return int(at)

    def queue_ms(self) -> float:
        """From the request's arrival to decode's asking for it."""
        return (self.asked_ns - self.arrival_ns) / 1e6

    def arrival_to_decode_ms(self) -> float:
        """From the request's arrival to decode's start: waiting, prefill and what the handover adds."""
        return (self.decode_may_start_ns - self.arrival_ns) / 1e6


def summarize(handovers: list[Handover], limit: Limit) -> dict[str, Any]:
    """Returns the figures of a run, ready for JSON."""
    limits = limit.figures()
    limit_rate = limits["limit"]["gb_per_s"]
    stages = [handover.stages_ms() for handover in handovers]
    ideal_ns = [handover.ideal_ns(limit_rate) for handover in handovers]
    figures: dict[str, Any] = {
        "total_nbytes": sum(handover.nbytes for handover in handovers),
        "num_pages": sum(handover.num_pages for handover in handovers),
        "stages_ms": {stage: percentiles(one[stage] for one in stages) for stage in STAGES},
        "transfer_ms": percentiles(handover.transfer_ns() / 1e6 for handover in handovers),
        "gb_per_s": percentiles(handover.nbytes / handover.transfer_ns() for handover in handovers),
        **limits,
        # From the first layer that could be moved to the last one in place, against the same at
        # the limit's rate: what a paced prefill makes both wait for counts for neither.
        "limit_ratio": median(
            (ideal - handover.released_ns[0]) / handover.transfer_ns()
            for ideal, handover in zip(ideal_ns, handovers, strict=True)
        ),
        "limit_last_layer_ms": percentiles(
            (ideal - handover.prefill_end_ns) / 1e6
            for ideal, handover in zip(ideal_ns, handovers, strict=True)
        ),
        "hidden_share": median(handover.hidden_share() for handover in handovers),
        "rails": sorted({rail for handover in handovers for rail in handover.rails}),
    }
    reused_nbytes = sum(handover.reused_nbytes for handover in handovers)
    figures["reused_share"] = round(reused_nbytes / (reused_nbytes + figures["total_nbytes"]), 3)
    return figures
