from __future__ import annotations

import asyncio
import gc
import mmap
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

import kvxfer
from kvxfer import Agent, AgentOptions, Trigger
from kvxfer._native import After
from kvxfer.errors import TransferError, UsageError
from tests.unit.test_agent import Ends

TIMEOUT_S = 30.0


@pytest.fixture
def alone() -> Any:
    with Agent("alone", AgentOptions(listen="", transports=("loopback",))) as agent:
        yield agent


@pytest.fixture
def ends(fake_core: list[Any]) -> Ends:
    return Ends(fake_core)


def test_a_value_only_grows_until_it_is_reset(alone: Agent) -> None:
    trigger = alone.trigger()
    assert trigger.value == 0
    trigger.fire()
    trigger.fire(7)
    trigger.fire(3)
    assert trigger.value == 7
    trigger.reset()
    assert trigger.value == 0
    assert repr(trigger) == "<Trigger at 0>"


def test_memory_of_a_callers_is_its_word(alone: Agent) -> None:
    word = np.zeros(1, np.uint32)
    trigger = alone.trigger(word)
    word[0] = 12
    assert trigger.value == 12
    trigger.fire(13)
    assert word[0] == 13
    assert trigger.share() == word.ctypes.data
    shared = mmap.mmap(-1, 4096)
    view = memoryview(shared)[64:68]
    over = alone.trigger(view)
    over.fire(3)
    assert shared[64:68] == b"\3\0\0\0"
    with pytest.raises(BufferError):  # exported for as long as the trigger is there
        view.release()
    del over
    gc.collect()
    view.release()
    shared.close()


@pytest.mark.parametrize(
    ("memory", "code"),
    [
        (np.zeros(2, np.uint32), "length-mismatch"),
        (np.zeros(1, np.uint64), "length-mismatch"),
        (b"abcd", "invalid-argument"),
        (memoryview(bytearray(9))[1:5], "invalid-argument"),
        (np.zeros(8, np.uint32)[::8], None),
        (3, "invalid-argument"),
    ],
)
def test_what_is_no_word_is_refused(alone: Agent, memory: Any, code: str | None) -> None:
    if code is None:  # one element has no stride that matters
        assert alone.trigger(memory).value == 0
        return
    with pytest.raises(UsageError) as raised:
        alone.trigger(memory)
    assert raised.value.code == code


# ---- what after= takes ---------------------------------------------------------------------------


class TorchStream:
    def __init__(self, handle: int, device: int | None) -> None:
        self.cuda_stream = handle
        self.device = SimpleNamespace(type="cuda", index=device)


class TorchEvent:
    def __init__(self, handle: int, device: int | None) -> None:
        self.cuda_event = handle
        self.device = None if device is None else SimpleNamespace(type="cuda", index=device)


class CoreStream:
    def __init__(self, handle: int, device: int) -> None:
        self.handle = handle
        self.device = SimpleNamespace(device_id=device)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class CoreEvent:
    is_done = False

    def __init__(self, handle: int, device: int) -> None:
        self.handle = handle
        self.device = SimpleNamespace(device_id=device)


POSTS: list[Callable[..., Any]] = [
    lambda ends, **options: ends.agent.write(ends.region, ends.remote, [1], [2], **options),
    lambda ends, **options: ends.agent.read(ends.region, ends.remote, [1], [2], **options),
]


@pytest.mark.parametrize("post", POSTS, ids=["write", "read"])
@pytest.mark.parametrize(
    ("waited", "verb", "handle"),
    [
        (TorchStream(0, 0), "after_stream", 0),  # the default stream
        (TorchStream(77, 0), "after_stream", 77),
        (CoreStream(78, 0), "after_stream", 78),
        (TorchEvent(79, 0), "after_event", 79),
        (CoreEvent(80, 0), "after_event", 80),
    ],
)
def test_streams_and_events_are_known_by_their_protocols(
    ends: Ends, post: Any, waited: Any, verb: str, handle: int
) -> None:
    post(ends, after=waited)
    assert ends.core.called(verb) == [(handle,)]
    assert isinstance(ends.post()[-1], After)


@pytest.mark.parametrize("post", POSTS, ids=["write", "read"])
@pytest.mark.parametrize(
    ("waited", "words"),
    [
        (TorchStream(77, 1), "the stream is on GPU 1, but the agent's GPU is 0"),
        (CoreStream(78, 2), "the stream is on GPU 2, but the agent's GPU is 0"),
        (TorchEvent(79, 3), "the event is on GPU 3, but the agent's GPU is 0"),
        (CoreEvent(80, 4), "the event is on GPU 4, but the agent's GPU is 0"),
        (TorchEvent(0, None), "the event was never recorded"),
        (object(), "or a future, not a object"),
        ("now", "not a str"),
    ],
)
def test_what_cannot_be_waited_for_posts_nothing(ends: Ends, post: Any, waited: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        post(ends, after=waited)
    assert not ends.core.called("post")


@pytest.mark.parametrize("event", [TorchEvent(79, 0), CoreEvent(80, 0)])
def test_an_event_is_not_asked_for_while_torch_captures_a_graph(
    ends: Ends, event: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver breaks a capture when it is queried about one of its events."""
    captures = True
    cuda = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: captures)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with pytest.raises(UsageError, match="captured into a graph"):
        POSTS[0](ends, after=event)
    assert not ends.core.called("after_event")
    captures = False
    POSTS[0](ends, after=event)
    assert ends.core.called("after_event")


@pytest.mark.parametrize("post", POSTS, ids=["write", "read"])
async def test_a_future_lets_go_or_cancels(ends: Ends, post: Any) -> None:
    done, failed, cancelled = (asyncio.get_running_loop().create_future() for _ in range(3))
    for future in (done, failed, cancelled):
        post(ends, after=future)
    assert ends.held()
    done.set_result(None)
    failed.set_exception(ValueError("the other end failed"))
    cancelled.cancel()
    await asyncio.sleep(0)
    assert [handle.ready for handle in ends.core.handles] == [4, -1, -1]
    assert [handle.cancelled for handle in ends.core.handles] == [False, True, True]
    over: Future[None] = Future()
    over.set_result(None)
    post(ends, after=over)
    assert not ends.held()


def test_a_stream_is_recorded_with_its_value(ends: Ends) -> None:
    trigger = ends.agent.trigger()
    trigger.record(TorchStream(9, 0))
    trigger.record(CoreStream(8, 0), 4)
    assert ends.core.called("record") == [(9, 1), (8, 4)]
    with pytest.raises(UsageError, match=r"recorded in a torch or cuda\.core stream, not in a int"):
        trigger.record(3)


def test_an_agent_without_a_gpu_says_so(alone: Agent) -> None:
    trigger = alone.trigger()
    with pytest.raises(UsageError, match="agent 'alone' has no GPU whose streams") as raised:
        trigger.record(TorchStream(9, 0))
    assert raised.value.code == "unsupported"


def test_a_closed_agent_makes_none() -> None:
    agent = Agent("gone", AgentOptions(listen="", transports=("loopback",)))
    trigger = agent.trigger()
    agent.close()
    with pytest.raises(kvxfer.AgentError):
        agent.trigger()
    trigger.fire()
    assert trigger.value == 1


# ---- real agents ---------------------------------------------------------------------------------


class Two:
    """Two agents of this process, and a cache of one layer at each."""

    def __init__(self, src: Agent, dst: Agent) -> None:
        self.src, self.dst = src, dst
        self.pages = np.arange(8 * 64, dtype=np.uint8).reshape(8, 64)
        self.landed = np.zeros_like(self.pages)
        self.region = src.register("kv", self.pages)
        self.target = dst.register("kv", self.landed)
        self.there = src.connect_blocking(dst.address, TIMEOUT_S)
        self.here = dst.accept_blocking("src", TIMEOUT_S)
        self.target.grant(self.here, None, "write", ttl_s=TIMEOUT_S)
        self.region.grant(self.there, None, "read", ttl_s=TIMEOUT_S)

    def trigger(self, write: bool, memory: Any = None) -> Trigger:
        """Of the agent that posts."""
        return (self.src if write else self.dst).trigger(memory)

    def post(self, write: bool, after: Any, **options: Any) -> kvxfer.Transfer:
        options.setdefault("timeout_s", TIMEOUT_S)
        if write:
            remote = self.there.region_blocking("kv", TIMEOUT_S)
            return self.src.write(self.region, remote, [1, 5], [2, 3], after=after, **options)
        remote = self.here.region_blocking("kv", TIMEOUT_S)
        return self.dst.read(self.target, remote, [1, 5], [2, 3], after=after, **options)


@pytest.fixture
def two() -> Any:
    options = AgentOptions(listen="tcp://127.0.0.1:0", transports=("loopback", "tcp"))
    with Agent("src", options) as src, Agent("dst", options) as dst:
        yield Two(src, dst)


@pytest.mark.parametrize("write", [True, False])
def test_any_of_its_agents_transfers_wait_for_one_trigger(two: Two, write: bool) -> None:
    trigger = two.trigger(write)
    first, second = two.post(write, trigger), two.post(write, trigger.at(2))
    assert not two.landed.any()
    trigger.fire()
    first.wait(TIMEOUT_S)
    np.testing.assert_array_equal(two.landed[[2, 3]], two.pages[[1, 5]])
    assert second.state == "pending"
    trigger.fire(2)
    second.wait(TIMEOUT_S)


def test_several_agents_wait_for_one_word_by_a_trigger_each(two: Two) -> None:
    word = np.zeros(1, np.uint32)
    triggers = [two.trigger(write, word) for write in (True, False)]
    transfers = [two.post(write, triggers[not write]) for write in (True, False)]
    with pytest.raises(UsageError, match="make one with this agent's trigger"):
        two.post(True, triggers[1])
    assert not two.landed.any()
    triggers[0].fire()
    for transfer in transfers:
        transfer.wait(TIMEOUT_S)
    assert triggers[1].value == 1


@pytest.mark.parametrize("write", [True, False])
def test_a_trigger_that_nobody_keeps_is_kept_by_its_transfer(two: Two, write: bool) -> None:
    word = np.zeros(1, np.uint32)
    transfer = two.post(write, two.trigger(write, word).at(3))
    gc.collect()
    word[0] = 3
    transfer.wait(TIMEOUT_S)
    assert transfer.succeeded


@pytest.mark.parametrize("write", [True, False])
def test_one_that_never_fires_fails_at_its_deadline(two: Two, write: bool) -> None:
    transfer = two.post(write, two.trigger(write), timeout_s=0.2)
    with pytest.raises(TransferError) as raised:
        transfer.wait(TIMEOUT_S)
    assert raised.value.code == "deadline"
    assert not two.landed.any()


async def test_awaiting_wakes_where_another_thread_fires(two: Two) -> None:
    for write in (True, False):
        trigger = two.trigger(write)
        transfer = two.post(write, trigger)
        waiting = asyncio.ensure_future(asyncio.wait_for(transfer, TIMEOUT_S))
        await asyncio.sleep(0)
        await asyncio.to_thread(trigger.fire)
        await waiting
        assert transfer.succeeded
