"""The numbers of a cache's elements in plain numpy and ml_dtypes.

What a benchmark holds conversions to. It shares nothing with the engine.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: dtype -> integers of the same size, in which a cache keeps its elements here
STAND_INS: Final[dict[str, np.dtype[Any]]] = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
}


def widen(codes: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Returns the numbers of stand-in integers as float32, which is exact."""
    return codes.view(_type(dtype)).astype(np.float32)


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns the stand-in integers of float32 numbers, rounded to nearest, ties to even."""
    return np.asarray(values.astype(_type(dtype)).view(STAND_INS[dtype]))


def _type(dtype: str) -> np.dtype[Any]:
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
    return found
