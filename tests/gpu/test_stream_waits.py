"""Streams of torch and cuda.core that wait for transfers, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvxfer
from kvxfer.errors import KvxferError, UsageError
from tests.gpu.ends import SHAPE, TIMEOUT_S, Ends, ends

pytestmark = pytest.mark.gpu
__all__ = ["ends"]  # a fixture


def look(ends: Ends, stream: Any, seen: Any) -> None:
    """Copies the pages in the stream, as a kernel enqueued there would see them."""
    import torch

    with torch.cuda.stream(stream):
        seen.copy_(ends.landed)


def room(ends: Ends) -> Any:
    """Returns memory for `look`, allocated before anything waits: an allocation may wait for the device."""
    import torch

    return torch.empty_like(ends.landed)


def fill(ends: Ends, value: int) -> None:
    import torch

    ends.pages.fill_(value)
    torch.cuda.synchronize()


def of_torch(stream: Any) -> Any:
    return stream


def of_core(stream: Any) -> Any:
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    return device.create_stream(stream)


@pytest.mark.parametrize("made", [of_torch, of_core])
def test_kernels_behind_a_wait_see_what_has_landed(ends: Ends, made: Callable[[Any], Any]) -> None:
    seen = room(ends)
    for value in range(1, 50):
        fill(ends, value)
        trigger = ends.dst.trigger()
        transfer = ends.read(trigger)
        wait = transfer.wait_in(made(ends.stream))
        look(ends, ends.stream, seen)
        assert not ends.stream.query()
        trigger.fire()
        ends.stream.synchronize()
        assert bool((seen == value).all())
        assert wait.outcome == "done"
        transfer.wait(TIMEOUT_S)


def test_the_default_stream_waits_as_well(ends: Ends) -> None:
    import torch

    seen = room(ends)
    fill(ends, 5)
    trigger = ends.dst.trigger()
    ends.read(trigger).wait_in(torch.cuda.default_stream())
    look(ends, torch.cuda.default_stream(), seen)
    trigger.fire()
    torch.cuda.synchronize()
    assert bool((seen == 5).all())


@pytest.mark.parametrize("how", ["cancel", "deadline", "revoke", "peer", "agent"])
def test_a_stream_goes_on_however_its_transfer_fails(ends: Ends, how: str) -> None:
    transfer = ends.read(ends.dst.trigger(), timeout_s=0.2 if how == "deadline" else TIMEOUT_S)
    wait = transfer.wait_in(ends.stream)
    if how == "cancel":
        transfer.cancel()
    elif how == "revoke":
        ends.lease.revoke_blocking()
    elif how == "peer":
        ends.src.close()
    elif how == "agent":
        ends.dst.close()
    ends.stream.synchronize()
    assert wait.outcome == ("cancelled" if how == "cancel" else "failed")
    if how != "agent":
        with pytest.raises(KvxferError):
            transfer.wait(TIMEOUT_S)


def test_many_streams_wait_while_others_are_served(ends: Ends) -> None:
    """More streams wait than a device has queues; none of them may block the copies that release them."""
    import torch

    streams = [torch.cuda.Stream() for _ in range(96)]
    seen = [room(ends) for _ in streams]
    fill(ends, 9)
    trigger = ends.dst.trigger()
    transfer = ends.read(trigger)
    waits = [transfer.wait_in(stream) for stream in streams]
    for stream, into in zip(streams, seen, strict=True):
        look(ends, stream, into)
    trigger.fire()
    torch.cuda.synchronize()
    assert {wait.outcome for wait in waits} == {"done"}
    assert all(bool((each == 9).all()) for each in seen)


def test_a_kernel_reads_how_it_ended(ends: Ends) -> None:
    import torch
    from cuda.bindings import driver

    done, failed = ends.read(None), ends.read(ends.dst.trigger(), timeout_s=0.2)
    waits = [done.wait_in(ends.stream), failed.wait_in(ends.stream)]
    read = torch.zeros(2, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for at, wait in enumerate(waits):
        (status,) = driver.cuMemcpyAsync(read[at:].data_ptr(), wait.address, 4, ends.stream.cuda_stream)
        assert int(status) == 0
    ends.stream.synchronize()
    assert read.tolist() == [1, 2]


def test_pages_of_host_memory_are_waited_for_too(ends: Ends) -> None:
    import torch

    pages, landed = (torch.zeros(SHAPE, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    pages.fill_(7)
    seen = room(ends)
    region, target = ends.src.register("host", pages), ends.dst.register("host", landed)
    (there,), (here,) = ends.src.peers, ends.dst.peers
    lease = region.grant(there, None, "read", ttl_s=TIMEOUT_S)
    source = here.region_blocking("host", TIMEOUT_S)
    trigger = ends.dst.trigger()
    transfer = ends.dst.read(
        target, source, [0, 1], [2, 3], after=trigger, lease=lease.token, timeout_s=TIMEOUT_S
    )
    transfer.wait_in(ends.stream)
    with torch.cuda.stream(ends.stream):
        seen.copy_(landed, non_blocking=True)
    trigger.fire()
    ends.stream.synchronize()
    assert bool((seen[2:] == 7).all())


def test_a_capture_and_another_gpu_are_refused(ends: Ends) -> None:
    import torch

    transfer = ends.read(ends.dst.trigger())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=ends.stream):
        ends.landed.add_(1)
        with pytest.raises(UsageError, match="captured"):
            transfer.wait_in(torch.cuda.current_stream())
    if torch.cuda.device_count() > 1:
        with pytest.raises(UsageError, match="on GPU 1, but the agent's GPU is 0"):
            transfer.wait_in(torch.cuda.Stream(1))
    transfer.cancel()
    with pytest.raises(kvxfer.TransferError):
        transfer.wait(TIMEOUT_S)
