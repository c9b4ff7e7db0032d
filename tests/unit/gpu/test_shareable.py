"""Memory in which torch allocates: a stand-in for torch records its calls."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer import UsageError, _native
from kvxfer.gpu import shareable, shareable_memory

ALLOCATE = """
import ctypes
from kvxfer import _native
library = ctypes.CDLL(_native.__file__)
library.kvxfer_gpu_allocate.restype = ctypes.c_void_p
library.kvxfer_gpu_allocate.argtypes = ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
library.kvxfer_gpu_free.argtypes = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
"""


class OutOfMemoryError(RuntimeError):
    pass


class Torch:
    """The parts of torch that are used, with a record of the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.OutOfMemoryError = OutOfMemoryError
        self.__version__ = "2.5"
        memory = types.SimpleNamespace(CUDAPluggableAllocator=self.plug)
        self.cuda = types.SimpleNamespace(
            memory=memory, MemPool=self.pool, use_mem_pool=self.use, device=self.device
        )

    def plug(self, path: str, allocate: str, free: str) -> Any:
        self.calls.append(("plug", path, allocate, free))
        return types.SimpleNamespace(allocator=lambda: "allocator")

    def pool(self, allocator: str) -> str:
        self.calls.append(("pool", allocator))
        return "pool"

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.calls.append(("device", index))
        yield
        self.calls.append(("device ends",))

    @contextlib.contextmanager
    def use(self, pool: str, device: int) -> Iterator[None]:
        self.calls.append(("use", pool, device))
        try:
            yield
        finally:
            self.calls.append(("use ends",))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    shareable._pool.cache_clear()
    shareable._allocator.cache_clear()
    yield made
    shareable._pool.cache_clear()
    shareable._allocator.cache_clear()


@pytest.fixture
def without_driver() -> None:
    if _native.gpu_driver_missing() is None:
        pytest.skip("there is a CUDA driver here")


def test_torch_is_given_our_functions_once_and_its_pool_for_each_block(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(_native, "gpu_pool_check", asked.append)
    for _ in range(2):
        with shareable_memory(1):
            torch.calls.append(("block",))
    block = [("use", "pool", 1), ("block",), ("use ends",)]
    assert torch.calls == [
        ("plug", _native.__file__, "kvxfer_gpu_allocate", "kvxfer_gpu_free"),
        ("device", 1),
        ("pool", "allocator"),
        ("device ends",),
        *block,
        *block,
    ]
    assert asked == [1]
    library = ctypes.CDLL(_native.__file__)
    assert library.kvxfer_gpu_allocate
    assert library.kvxfer_gpu_free


def test_a_lack_of_memory_is_torchs_error_with_our_words(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(["of somebody else", "GPU 0 has no room", "", ""])
    monkeypatch.setattr(_native, "gpu_pool_check", lambda device: None)
    monkeypatch.setattr(_native, "gpu_pool_failure", lambda: next(said))
    with pytest.raises(OutOfMemoryError) as caught, shareable_memory():
        raise OutOfMemoryError
    assert caught.value.__notes__ == ["kvxfer: GPU 0 has no room"]
    # An error from outside our pool does not get our note.
    with pytest.raises(OutOfMemoryError) as caught, shareable_memory():
        raise OutOfMemoryError
    assert not hasattr(caught.value, "__notes__")


def test_without_what_it_needs_it_is_refused_before_the_block(
    torch: Torch, monkeypatch: pytest.MonkeyPatch, without_driver: None
) -> None:
    def refused() -> str:
        with pytest.raises(UsageError) as caught, shareable_memory():
            pytest.fail("the block was entered")
        assert caught.value.code == "unsupported"
        return str(caught.value)

    assert "no CUDA driver" in refused()
    del torch.cuda.MemPool
    assert "has no torch.cuda.MemPool" in refused()
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "needs torch, which cannot be imported" in refused()


def test_what_torch_calls_fails_in_words_and_frees_nothing_that_is_not_ours(without_driver: None) -> None:
    program = ALLOCATE + (
        "assert library.kvxfer_gpu_allocate(1 << 20, 0, None) is None\n"
        "assert 'no CUDA driver' in _native.gpu_pool_failure()\n"
        "assert _native.gpu_pool_failure() == ''\n"
        "assert _native.gpu_pool_nbytes(0) == 0 and _native.gpu_pool_handles(0) == ''\n"
        "library.kvxfer_gpu_free(4096, 1 << 20, 3, None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "kvxfer: memory of GPU 3 was freed, but no pool has allocated any on it\n"
