"""Layouts by name: ``tp4+hnd+fp8`` is one rank's slice, the order of its axes and its elements. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvxfer.bench.errors import BenchError

#: order -> axes of a tensor as `kvxfer.KVLayout` reads them; `TENSORS` says of how many.
ORDERS: Final = {
    "nhd": "l2bthd",
    "hnd": "l2bhtd",
    "lbhnc": "lbhtc",
    "lbnhc": "lbthc",
    "lhbnc": "lhbtc",
    "blhnc": "blhtc",
    "blnhc": "blthc",
    "bhlnc": "bhltc",
    "split": "2bthd",
    "apart": "bthd",
}
#: Orders in which every layer has a tensor of its own, or two.
LISTED: Final = ("split", "apart")
DTYPES: Final = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "int8": "int8",
}
#: name -> `kvxfer.Quantization.per`
SCALES: Final = {"per-tensor": "tensor", "per-head": "head", "per-page": "page", "per-page-head": "page_head"}
# What a name says -> the names that say it, and as what.
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "tp": {f"tp{size}": size for size in (1, 2, 4, 8)},
    "pp": {f"pp{size}": size for size in (1, 2)},
    "order": {order: order for order in ORDERS},
    "dtype": DTYPES,
    "scales": SCALES,
    "page": {f"p{tokens}": tokens for tokens in (16, 32, 48, 64)},
}
#: For help texts.
NAMES: Final = "; ".join(" ".join(names) for names in _KINDS.values())


@dataclass(frozen=True, slots=True)
class NamedLayout:
    """What the names of one end say; ``scales`` is ``""`` where elements are the values themselves."""

    tp: int
    pp: int
    order: str
    dtype: str
    scales: str
    block_tokens: int

    @classmethod
    def parse(cls, text: str) -> NamedLayout:
        """Reads names joined by ``+``, in any order; what is not named takes its default.

        Defaults: tp1, pp1, nhd, bf16, p16; fp8, e5m2 and int8 have scales per-tensor, others none.

        Raises
        ------
        BenchError
            An unknown name (all are listed then), two names of one kind, scales of unscaled elements.
        """
        said: dict[str, str] = {}
        for name in text.lower().split("+"):
            kind = next((kind for kind, names in _KINDS.items() if name.strip() in names), None)
            if kind is None:
                raise BenchError(f"unknown name {name!r} in the layout {text!r}; known are {NAMES}")
            if kind in said:
                raise BenchError(
                    f"the layout {text!r} says {said[kind]!r} and {name.strip()!r}: one {kind} alone"
                )
            said[kind] = name.strip()
        values = {kind: _KINDS[kind][name] for kind, name in said.items()}
        dtype = values.get("dtype", "bfloat16")
        scaled = dtype.startswith("float8") or dtype == "int8"
        if "scales" in said and not scaled:
            raise BenchError(f"{said['scales']!r} in {text!r}: scales belong to fp8, e5m2 and int8")
        return cls(
            tp=values.get("tp", 1),
            pp=values.get("pp", 1),
            order=values.get("order", "nhd"),
            dtype=dtype,
            scales=values.get("scales", "tensor") if scaled else "",
            block_tokens=values.get("page", 16),
        )
