"""Two processes on one GPU: one reads the other's memory by each kind of handle; bytes verified."""

from __future__ import annotations

import os

import pytest

from tests.gpu.test_agents import TIMEOUT_S, Decode, Source, require_same

pytestmark = pytest.mark.gpu

SETTING = "PYTORCH_CUDA_ALLOC_CONF"
# How the source allocates -> its argument and torch's setting. Memory from cudaMalloc is shared by cudaIpc;
# expandable segments by descriptor; the pool's memory by descriptor, or by fabric handle if the device has
# them.
KINDS = {
    "cudaIpc of the caching allocator": ((), "expandable_segments:False"),
    "expandable segments": ((), "expandable_segments:True"),
    "the pool": (("pool",), "expandable_segments:False"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_read_and_written_whatever_the_memory_is(kind: str) -> None:
    import torch

    arguments, setting = KINDS[kind]
    source = Source(*arguments, **{SETTING: setting})
    try:
        decode = Decode(source)
        with decode.agent:
            handles = source.ask("handles")
            assert handles in (("fabric", "descriptor") if arguments else ("torch's own",))
            decode.read(decode.region, "pages").wait(TIMEOUT_S)
            require_same(decode.cache, decode.pattern(1).flip(1))
            decode.cache.copy_(decode.pattern(3))
            torch.cuda.synchronize()
            decode.agent.write(
                decode.region, decode.remote["target"], decode.blocks, decode.blocks, timeout_s=TIMEOUT_S
            ).wait(TIMEOUT_S)
            assert source.ask("compare 3") == "0"
            # The source waits for this process, which unmaps the pages before it answers.
            assert source.ask("deregister") == "deregistered"
            decode.read(decode.host_region, "host").wait(TIMEOUT_S)
            require_same(decode.host, decode.pattern(2).flip(1))
    finally:
        source.kill()


def test_a_destination_in_the_pool_is_filled() -> None:
    import torch

    import kvxfer
    from kvxfer.gpu import shareable_memory

    source = Source(**{SETTING: os.environ.get(SETTING, "")})
    try:
        decode = Decode(source)
        with decode.agent:
            with shareable_memory():
                cache = torch.zeros_like(decode.cache)
            torch.cuda.synchronize()
            layout = kvxfer.KVLayout.from_tensor(cache, axes="lbd")
            region = decode.agent.register("in the pool", cache, layout)
            decode.read(region, "pages").wait(TIMEOUT_S)
            require_same(cache, decode.pattern(1).flip(1))
            region.deregister_blocking()
    finally:
        source.kill()
