"""Numbers of the dtypes that can be converted, by ml_dtypes: the reference of every rounding."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

#: As a conversion of a copy program numbers them.
NUMBERS: Final = {1: "bfloat16", 2: "float16", 3: "float32", 4: "float8_e4m3fn", 5: "float8_e5m2", 6: "int8"}
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
LARGEST: Final = {
    "bfloat16": 2.0**128 - 2.0**120,
    "float16": 65504.0,
    "float32": 2.0**128 - 2.0**104,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "int8": 127.0,
}


def widen(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Returns the stored numbers as float32; exact for every dtype."""
    with np.errstate(all="ignore"):
        return stored.astype(np.float32)


def narrow(x: NDArray[np.float32], dtype: str, saturate: bool = False) -> NDArray[Any]:
    """Returns float32 rounded to nearest even.

    A number that is too large becomes NaN (e4m3fn has no infinity), infinity, or with `saturate` the largest
    finite number; int8 always clamps, to -128 and 127, and its NaN is 0.
    """
    with np.errstate(all="ignore"):
        if dtype == "int8":
            whole = np.clip(np.rint(x), -128, 127)
            return np.where(np.isnan(whole), 0, whole).astype(np.int8)
        out: NDArray[Any] = x.astype(DTYPES[dtype])
        if saturate:
            # A number is too large by how it rounds: 464 is a tie of e4m3fn that still goes to 448.
            over = ~np.isnan(x) & ~np.isfinite(out.astype(np.float32))
            limit = np.copysign(np.float32(LARGEST[dtype]), x).astype(DTYPES[dtype])
            out = np.where(over, limit, out)
        return out


def dynamic_scale(x: NDArray[np.float32], dtype: str) -> np.float32:
    """Returns the scale that lets the largest finite number of a granule be the dtype's largest."""
    finite = np.abs(x[np.isfinite(x)])
    amax = np.float32(finite.max()) if finite.size else np.float32(0)
    if amax == 0:
        return np.float32(1)
    # A subnormal scale has too few bits: amax / scale could then lie beyond the largest number.
    return np.float32(max(amax / np.float32(LARGEST[dtype]), np.float32(2.0**-126)))
