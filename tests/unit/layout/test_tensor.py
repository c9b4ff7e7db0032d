"""tensor: memory of any library is seen, not copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import UsageError
from kvxfer.layout.tensor import covering_spans, flatten, view


class Torch:
    """What a torch tensor shows, without torch."""

    def __init__(
        self, array: np.ndarray[Any, Any], dtype: str = "torch.bfloat16", device: str = "cpu"
    ) -> None:
        self.array, self.dtype, self.device, self.shape = array, dtype, device, array.shape

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)


class Dlpack:
    def __init__(self, array: np.ndarray[Any, Any], device: int = 1) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


def test_numpy_with_strides() -> None:
    array = np.zeros((4, 6), np.float16)[1:3, ::2]
    seen = view(array)
    assert (seen.shape, seen.strides, seen.dtype, seen.itemsize) == ((2, 3), (12, 4), "float16", 2)
    assert seen.address == array.ctypes.data
    assert seen.nbytes == 12 + 2 * 4 + 2
    assert seen.owner is array
    assert view(seen) is seen


def test_torch_by_its_methods() -> None:
    array = np.zeros((2, 3), np.uint16)
    seen = view(Torch(array))
    assert (seen.dtype, seen.strides, seen.address) == ("bfloat16", (6, 2), array.ctypes.data)


def test_buffer_and_dlpack() -> None:
    memory = bytearray(16)
    assert view(memory).nbytes == 16
    view(memory)
    array = np.arange(6, dtype=np.float32)
    seen = view(Dlpack(array))
    assert (seen.address, seen.dtype) == (array.ctypes.data, "float32")


@pytest.mark.parametrize(
    ("tensor", "code"),
    [
        (b"read-only", "invalid-argument"),
        (3, "invalid-argument"),
        (np.array([None]), "invalid-argument"),
        (np.zeros(4)[::-1], "invalid-argument"),
        (Torch(np.zeros(2), device="xpu:0"), "unsupported"),
        (Dlpack(np.zeros(2), device=2), "unsupported"),
    ],
)
def test_what_cannot_be_registered(tensor: Any, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        view(tensor)
    assert caught.value.code == code


def test_read_only_and_broadcast_are_refused() -> None:
    array = np.zeros(4)
    array.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        view(array)
    broadcast = np.lib.stride_tricks.as_strided(np.zeros(4), (3, 4), (0, 8))
    with pytest.raises(UsageError, match="stride of 0"):
        view(broadcast)


def test_flatten_keeps_order() -> None:
    assert list(flatten({"a": [1, (2, 3)], "b": {"c": 4}})) == [1, 2, 3, 4]
    assert list(flatten(5)) == [5]


def test_spans_are_few_and_leave_gaps_out() -> None:
    arena = np.zeros(1000, np.uint8)
    base = arena.ctypes.data
    parts = [arena[300:400], arena[0:100], arena[100:200], arena[20:50], arena[350:500], arena[900:900]]
    assert covering_spans([view(part) for part in parts]) == [(base, 200), (base + 300, 200)]
