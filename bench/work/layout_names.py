"""Layouts by name: ``tp4+hnd+fp8`` is one rank's slice, the order of its axes and its elements. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvxfer.bench.errors import BenchError

# What a name says -> the names that say it, and as what; the first is what is not named.
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "tp": {"tp1": 1, "tp2": 2, "tp4": 4, "tp8": 8},
    # Axes of a tensor, as `kvxfer.KVLayout` reads them.
    "axes": {"nhd": "l2bthd", "hnd": "l2bhtd"},
    "dtype": {"bf16": "bfloat16", "fp8": "float8_e4m3fn"},
    "block_tokens": {"p16": 16, "p64": 64},
}
#: For help texts.
NAMES: Final = "; ".join(" ".join(names) for names in _KINDS.values())


@dataclass(frozen=True, slots=True)
class NamedLayout:
    """What the names of one end say. Elements of fp8 have a scale for the tensor."""

    tp: int
    axes: str
    dtype: str
    block_tokens: int

    @classmethod
    def parse(cls, text: str) -> NamedLayout:
        """Reads names joined by ``+``, in any order; what is not named is tp1, nhd, bf16 and p16.

        Raises `BenchError` for an unknown name (all are listed then), and two names of one kind.
        """
        values = {kind: next(iter(names.values())) for kind, names in _KINDS.items()}
        said: dict[str, str] = {}
        for name in (part.strip() for part in text.lower().split("+")):
            kind = next((kind for kind, names in _KINDS.items() if name in names), None)
            if kind is None:
                raise BenchError(f"unknown name {name!r} in the layout {text!r}; known are {NAMES}")
            if kind in said:
                raise BenchError(
                    f"the layout {text!r} names {said[kind]!r} and {name!r}: name only one {kind}"
                )
            said[kind], values[kind] = name, _KINDS[kind][name]
        return cls(**values)
