"""Transfers that wait for torch's and cuda.core's streams and events, on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.errors import UsageError
from tests.gpu.ends import SHAPE, TIMEOUT_S, Ends, ends

pytestmark = pytest.mark.gpu
__all__ = ["ends"]  # a fixture


def _torch_stream(ends: Ends) -> Any:
    return ends.stream


def _torch_event(ends: Ends) -> Any:
    return ends.stream.record_event()


def _core_stream(ends: Ends) -> Any:
    from cuda.core import Device

    return Device().create_stream(ends.stream)


def _core_event(ends: Ends) -> Any:
    return _core_stream(ends).record()


def _trigger(ends: Ends) -> Any:
    trigger = ends.src.trigger()
    trigger.record(ends.stream, 3)
    return trigger.at(3)


WAITS: list[Callable[[Ends], Any]] = [_torch_stream, _torch_event, _core_stream, _core_event, _trigger]


@pytest.mark.parametrize("waits", WAITS, ids=lambda wait: wait.__name__.strip("_"))
def test_a_write_goes_when_what_it_waits_for_has_ended(ends: Ends, waits: Callable[[Ends], Any]) -> None:
    from cuda.core import Device

    Device(0).set_current()
    for value in (1, 2, 3):
        ends.produce(value)
        transfer = ends.write(waits(ends))
        ends.produce(99)  # enqueued later, and not waited for
        transfer.wait(TIMEOUT_S)
        assert ends.arrived(value)


def test_a_graph_fires_its_trigger_at_every_run(ends: Ends) -> None:
    import torch

    trigger = ends.src.trigger()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=ends.stream):
        ends.pages.add_(1)
        trigger.record(torch.cuda.current_stream())
    for run in (1, 2, 3):
        trigger.reset()
        transfer = ends.write(trigger)
        assert transfer.state == "pending"
        graph.replay()
        transfer.wait(TIMEOUT_S)
        assert ends.arrived(run)


def test_a_stream_and_an_event_of_a_capture_are_refused(ends: Ends) -> None:
    import torch

    graph = torch.cuda.CUDAGraph()
    event = torch.cuda.Event()
    with torch.cuda.graph(graph, stream=ends.stream):
        ends.pages.add_(1)
        event.record()
        for what in (torch.cuda.current_stream(), event):
            with pytest.raises(UsageError, match="captured"):
                ends.write(what)
    with pytest.raises(UsageError, match="captured"):
        ends.write(event)
    graph.replay()
    torch.cuda.synchronize()


def test_a_capture_takes_no_harm_from_agents(ends: Ends) -> None:
    import torch

    more = torch.zeros(SHAPE, dtype=torch.uint8, device="cuda")
    number = torch.zeros(1, device="cuda")
    ends.produce(5)
    event = ends.stream.record_event()
    errors: list[Exception] = []

    def move() -> None:
        try:
            region = ends.src.register("more", more)
            ends.write(event).wait(TIMEOUT_S)
            region.deregister_blocking()
        except Exception as error:
            errors.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # in the mode that watches all threads
        number.add_(1)
        thread = threading.Thread(target=move)
        thread.start()
        thread.join()
        number.add_(1)
    graph.replay()
    assert errors == []
    assert ends.arrived(5)
    assert number.item() == 2


def test_a_stream_of_another_gpu_is_refused(ends: Ends) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is here")
    with pytest.raises(UsageError, match="on GPU 1, but the agent's GPU is 0"):
        ends.write(torch.cuda.Stream(1))
