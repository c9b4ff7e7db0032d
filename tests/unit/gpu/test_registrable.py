"""Tensors on a GPU: how they are read, which ones an agent takes, and the errors for the others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import KVLayout, use_huge_pages
from kvxfer.agent import Agent
from kvxfer.errors import UsageError
from kvxfer.gpu import availability, calibration, driver, loading, registrable
from kvxfer.gpu.calibration import Calibration
from kvxfer.layout.tensor import UNTOLD_GPU, TensorView, view
from kvxfer.options import AgentOptions

pytestmark = pytest.mark.transports("shm", "cuda_ipc", "tcp")
WITH_GPU = AgentOptions(transports=("shm", "cuda_ipc", "tcp"))
SHAPE = 2, 8, 16
WAY_SAMPLE = 0, 0, 16, 65536, 2000, 1000
# To and from the host two CTAs are as fast as four.
CTA_SAMPLES = tuple((way, num, 1 << 22, ns) for way in (0, 1) for num, ns in ((1, 200), (2, 100), (4, 100)))


class Torch:
    """What a torch tensor on a GPU shows. Its memory is the host's: nothing may look at it."""

    def __init__(self, device: str = "cuda:0", address: int = 0x7F0000000000) -> None:
        self.device, self.address, self.dtype, self.shape = device, address, "torch.uint8", SHAPE

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return SHAPE[1] * SHAPE[2], SHAPE[2], 1


class CudaArray:
    """What CuPy's and Numba's arrays show."""

    def __init__(self, *, read_only: bool = False, strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": SHAPE,
            "typestr": "<f2",
            "data": (0x7F0000000000, read_only),
            "strides": strides,
            "version": 3,
        }


class CudaArrayOfDlpack(CudaArray):
    def __dlpack__(self) -> None:
        raise AssertionError("an import by DLPack may wait for a stream")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 5


def no_kernels(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(availability, "availability", lambda index=0: availability.Availability(reason))


def refusal(views: list[TensorView], options: AgentOptions) -> str:
    with pytest.raises(UsageError) as caught:
        registrable.device_of("kv", views, options)
    assert caught.value.code == "unsupported"
    return str(caught.value)


def test_tensors_on_a_gpu_are_seen_with_where_they_are() -> None:
    assert view(np.zeros(3)).gpu is None
    assert [view(Torch(device)).gpu for device in ("cuda", "cuda:0", "cuda:3")] == [0, 0, 3]
    seen = view(CudaArray())
    assert (seen.address, seen.shape, seen.strides) == (0x7F0000000000, SHAPE, (256, 32, 2))
    assert (seen.dtype, seen.itemsize, seen.gpu) == ("float16", 2, UNTOLD_GPU)
    assert view(CudaArray(strides=(512, 64, 4))).strides == (512, 64, 4)
    assert view(CudaArrayOfDlpack()).gpu == 5
    assert KVLayout.from_tensor(Torch(), "lbd").num_blocks == SHAPE[1]


def test_a_read_only_array_on_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="read-only"):
        view(CudaArray(read_only=True))


def test_where_kernels_cannot_run_a_tensor_on_a_gpu_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_kernels(monkeypatch, "no kernels: plug one in")
    with Agent("prefill", listen="") as agent:
        with pytest.raises(UsageError, match="cannot run here: no kernels: plug one in") as caught:
            agent.register("kv", Torch(), KVLayout.from_tensor(Torch(), "lbd"))
        assert caught.value.code == "unsupported"
        assert not agent.regions


def test_an_agent_without_the_transport_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    no_kernels(monkeypatch, "")
    said = refusal([view(Torch("cuda:2"))], AgentOptions(transports=("tcp",)))
    assert "AgentOptions(gpu=2)" in said


def test_an_agent_takes_memory_of_its_one_gpu_alone() -> None:
    views = [view(Torch("cuda:1")), view(Torch("cuda:1"))]
    assert registrable.device_of("kv", views, replace(WITH_GPU, gpu=1)) == 1
    assert "this agent's GPU is 0" in refusal([view(Torch("cuda:1"))], WITH_GPU)
    two = refusal([view(Torch("cuda:1")), view(Torch("cuda:0"))], WITH_GPU)
    assert "GPU 0 and GPU 1" in two
    assert "GPU 0 and host memory" in refusal([view(Torch()), view(np.zeros(3))], WITH_GPU)


def test_of_an_array_that_does_not_say_where_it_is_the_driver_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int | None] = [0, 1, None]
    monkeypatch.setattr(driver, "device_of", lambda address: found.pop(0))
    registrable.device_of("kv", [view(CudaArray())], WITH_GPU)
    assert "GPU 1" in refusal([view(CudaArray())], WITH_GPU)
    assert "that belongs to no GPU by the driver: the memory was freed" in refusal(
        [view(CudaArray())], WITH_GPU
    )
    no_kernels(monkeypatch, "")
    found.append(None)
    assert "that belongs to no GPU by the driver: the memory was freed" in refusal(
        [view(CudaArray())], AgentOptions()
    )


def test_kernels_are_loaded_for_an_agent_and_its_regions_are_told_to_be_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, fake_core: list[Any]
) -> None:
    kernels = SimpleNamespace(handle=11), None, SimpleNamespace(handle=13)
    monkeypatch.setattr(loading, "shared", lambda index: kernels if index == 3 else None)
    monkeypatch.setattr(calibration, "shared", lambda index: Calibration((WAY_SAMPLE,), CTA_SAMPLES))
    agent = Agent("prefill", replace(WITH_GPU, gpu=3))
    core = fake_core[-1]
    assert core.options["gpus"] == [
        {
            "device": 3,
            "kernels": (11, 0, 13),
            "owner": kernels,
            "ipc_ctas": 16,
            "staging_ctas": 2,
            "staging_nbytes": WITH_GPU.staging_nbytes,
            "way_samples": [WAY_SAMPLE],
        }
    ]
    on_gpu = Torch("cuda:3")
    agent.register("kv", on_gpu, KVLayout.from_tensor(on_gpu, "lbd"))
    agent.register("host", np.zeros((4, 16), np.uint8))
    assert [arguments[-2] for arguments in core.called("register")] == [3, -1]


def test_how_an_agent_copies_is_what_was_found_or_what_its_options_say(
    monkeypatch: pytest.MonkeyPatch, fake_core: list[Any]
) -> None:
    asked: list[int] = []

    def shared(index: int) -> Calibration:
        asked.append(index)
        return Calibration((WAY_SAMPLE,), CTA_SAMPLES)

    monkeypatch.setattr(loading, "shared", lambda index: (None, None, None))
    monkeypatch.setattr(calibration, "shared", shared)

    def told(**options: Any) -> tuple[int, int, int, int]:
        asked.clear()
        Agent("prefill", replace(WITH_GPU, **options))
        gpu = fake_core[-1].options["gpus"][0]
        return gpu["ipc_ctas"], gpu["staging_ctas"], len(gpu["way_samples"]), len(asked)

    assert told() == (16, 2, 1, 1)
    assert told(gpu_ctas=7) == (7, 7, 1, 1)
    assert told(copy_engines=False) == (16, 2, 0, 1)
    # Nothing is measured if no caller asks.
    assert told(copy_engines=False, gpu_ctas=7) == (7, 7, 0, 0)
    assert told(staging_nbytes=0) == (16, 4, 0, 0)
    assert told(staging_nbytes=0, gpu_ctas=7) == (7, 7, 0, 0)
    monkeypatch.setattr(calibration, "shared", lambda index: Calibration())
    assert told() == (16, 4, 0, 0)  # nothing could be measured


def test_huge_pages_are_not_a_gpus() -> None:
    with pytest.raises(UsageError, match="lies on a GPU"):
        use_huge_pages(Torch())
