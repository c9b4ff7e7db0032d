"""transfer: one end, the same for all waiters, and errors that name the blocks to recompute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer.agent import Agent
from kvxfer.errors import AgentError, UsageError
from kvxfer.options import AgentOptions
from kvxfer.transfer import Incoming, Scope, Transfer

REGION: Any = SimpleNamespace(name="kv")


@pytest.fixture
def incoming(fake_core: list[Any]) -> tuple[Any, Incoming]:
    agent = Agent("decode")
    core = fake_core[0]
    handle = core.made("expect", ())
    scope = Scope(
        agent._completions, peer_name="prefill", layers=range(4, 7), origin=2, arrives=True, region=REGION
    )
    return handle, Incoming(handle, scope, b"req")


def test_layers_of_others_are_refused(incoming: tuple[Any, Incoming]) -> None:
    _, work = incoming
    for layer in (3, 7, -1):
        with pytest.raises(UsageError, match="4 to 6"):
            work.layer_arrived(layer)
    with pytest.raises(TimeoutError):
        work.layer_blocking(4, 0)


# ---- streams that wait -----------------------------------------------------------------------------


def stream_of(handle: int, gpu: int) -> Any:
    """As torch has them."""
    return SimpleNamespace(cuda_stream=handle, device=SimpleNamespace(type="cuda", index=gpu))


def test_streams_wait_for_the_end_and_for_layers(incoming: tuple[Any, Incoming]) -> None:
    handle, work = incoming
    wait = work.wait_in(stream_of(77, 0))
    core = SimpleNamespace(device=SimpleNamespace(device_id=0), __cuda_stream__=lambda: (0, 78))
    work.wait_in(core, 5)
    # The core numbers layers as the region does.
    assert handle.waits == [(77, None), (78, 3)]
    assert (wait.outcome, wait.address) == ("pending", 64)
    assert repr(wait) == "<StreamWait pending>"


@pytest.mark.parametrize(
    ("stream", "layer", "code", "words"),
    [
        (stream_of(77, 1), None, "invalid-argument", "the stream is on GPU 1, but the agent's GPU is 0"),
        (77, None, "invalid-argument", "a torch or cuda.core stream can wait for a transfer, not a int"),
        (stream_of(77, 0), 9, "out-of-range", "layer 9 is not among layers 4 to 6"),
    ],
)
def test_what_no_stream_can_wait_for_is_refused(
    incoming: tuple[Any, Incoming], stream: Any, layer: int | None, code: str, words: str
) -> None:
    handle, work = incoming
    with pytest.raises(UsageError, match=words) as raised:
        work.wait_in(stream, layer)
    assert raised.value.code == code
    assert not handle.waits


def test_layers_of_a_write_arrive_elsewhere(fake_core: list[Any]) -> None:
    agent = Agent("prefill")
    handle = fake_core[0].made("expect", ())
    write = Transfer(
        handle, Scope(agent._completions, "decode", range(2), origin=0, arrives=False, region=REGION)
    )
    write.wait_in(stream_of(77, 0))
    for verb in (lambda: write.wait_in(stream_of(77, 0), 0), lambda: write.layer_arrived(0)):
        with pytest.raises(UsageError, match="layers arrive at the other end"):
            verb()
    assert handle.waits == [(77, None)]


def test_an_agent_without_a_gpu_lets_no_stream_wait() -> None:
    options = AgentOptions(listen="", transports=("loopback",))
    with Agent("alone", options) as agent:
        region = agent.register("kv", np.zeros((4, 64), np.uint8))
        expected = agent.expect(b"tag", [1], region)
        with pytest.raises(UsageError, match="agent 'alone' has no GPU in whose streams") as raised:
            expected.wait_in(stream_of(77, 0))
        assert raised.value.code == "unsupported"
        expected.cancel()
    with pytest.raises(AgentError):
        expected.wait_in(stream_of(77, 0))
