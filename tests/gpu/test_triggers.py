"""Transfers that wait for torch's and cuda.core's streams and events, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvxfer
from kvxfer.errors import UsageError

pytestmark = pytest.mark.gpu

TIMEOUT_S = 60.0
SHAPE = (4, 64 * 1024)
# So long that a byte that does not wait is certain to come too early; in cycles.
LONG = 200_000_000


class Ends:
    """Two agents of this process, with a cache on the GPU each."""

    def __init__(self, src: kvxfer.Agent, dst: kvxfer.Agent) -> None:
        import torch

        self.src, self.dst = src, dst
        self.pages = torch.zeros(SHAPE, dtype=torch.uint8, device="cuda")
        self.landed = torch.zeros_like(self.pages)
        torch.cuda.synchronize()
        self.region, target = src.register("kv", self.pages), dst.register("kv", self.landed)
        there = src.connect_blocking(dst.address, TIMEOUT_S)
        target.grant(dst.accept_blocking("src", TIMEOUT_S), None, "write", ttl_s=TIMEOUT_S)
        self.remote = there.wait_region("kv", TIMEOUT_S)
        self.stream = torch.cuda.Stream()

    def write(self, after: Any) -> kvxfer.Transfer:
        blocks = range(SHAPE[0])
        return self.src.write(self.region, self.remote, blocks, blocks, after=after, timeout_s=TIMEOUT_S)

    def produce(self, value: int) -> None:
        """Fills the cache in the stream, a while from now."""
        import torch

        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(LONG)
            self.pages.fill_(value)

    def arrived(self, value: int) -> bool:
        import torch

        torch.cuda.synchronize()
        return bool((self.landed == value).all())


@pytest.fixture
def ends() -> Iterator[Ends]:
    options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=("shm", "cuda_ipc", "tcp"))
    with kvxfer.Agent("src", options) as src, kvxfer.Agent("dst", options) as dst:
        yield Ends(src, dst)


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
    graph.replay()
    torch.cuda.synchronize()


def test_a_stream_of_another_gpu_is_refused(ends: Ends) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU is here")
    with pytest.raises(UsageError, match="of GPU 1, the agent's is GPU 0"):
        ends.write(torch.cuda.Stream(1))
