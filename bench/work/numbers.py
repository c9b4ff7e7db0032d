"""The numbers of a cache's elements, by the definition of their formats, in plain numpy.

What a benchmark holds conversions to. It shares nothing with the engine.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: dtype -> integers of the same size, in which a cache keeps its elements here
STAND_INS: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.uint32),
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
    "int8": np.dtype(np.uint8),
}
#: The largest numbers of types whose scales may be found page by page.
LARGEST: Final = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}

# Of 8-bit floats: bits of the mantissa, exponent of the smallest normal number, code of the largest
# number, and what is beyond it (NaN: e4m3fn has no infinity).
_SMALL: Final = {"float8_e4m3fn": (3, -6, 0x7E, 0x7F), "float8_e5m2": (2, -14, 0x7B, 0x7C)}
_SMALL_NAN: Final = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}


def widen(codes: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Returns the numbers of stand-in integers as float32, which is exact."""
    if dtype == "float32":
        return codes.view(np.float32)
    if dtype == "float16":
        return codes.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "int8":
        return codes.view(np.int8).astype(np.float32)
    return np.asarray(_small_values(dtype)[codes])


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns the stand-in integers of float32 numbers, rounded to nearest, ties to even."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        nan = ((bits >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7FC0)
        return np.where(np.isnan(values), nan, rounded).astype(np.uint16)
    if dtype == "int8":
        whole = np.rint(np.clip(np.where(np.isnan(values), np.float32(0), values), -128, 127))
        return np.asarray(whole.astype(np.int8).view(np.uint8))
    return _narrow_small(values, dtype)


def _narrow_small(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    mantissa_bits, smallest, largest_code, beyond = _SMALL[dtype]
    nan = np.isnan(values)
    magnitude = np.abs(np.where(np.isfinite(values), values, np.float32(0)))
    # frexp's fraction is below 1, so the leading bit has the exponent before.
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, smallest), smallest)
    steps = np.rint(np.ldexp(magnitude, mantissa_bits - exponent)).astype(np.int64)
    # The leading bit of a normal number adds 1 to the exponent's field, and so does a carry.
    codes = ((exponent - smallest).astype(np.int64) << mantissa_bits) + steps
    codes[(codes > largest_code) | np.isinf(values)] = beyond
    codes[nan] = _SMALL_NAN[dtype]
    return np.asarray(codes | np.where(np.signbit(values), 0x80, 0), np.uint8)


def _small_values(dtype: str) -> NDArray[np.float32]:
    """Returns the number of each of the 256 codes."""
    mantissa_bits, smallest, largest_code, beyond = _SMALL[dtype]
    codes = np.arange(128)
    field, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    leading = np.where(field > 0, 1 << mantissa_bits, 0)
    values = np.ldexp(
        (mantissa + leading).astype(np.float32), np.maximum(field, 1) - 1 + smallest - mantissa_bits
    )
    values[codes > largest_code] = np.nan
    if beyond != _SMALL_NAN[dtype]:
        values[beyond] = np.inf
    return np.concatenate((values, -values)).astype(np.float32)
