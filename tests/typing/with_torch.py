"""A user's program on torch's tensors and streams; where torch is installed, its types are known."""

from __future__ import annotations

import torch

import kvxfer


def main() -> None:
    """Writes two blocks from one list of tensors to another."""
    options = kvxfer.AgentOptions(transports=("loopback",))
    caches = [[torch.full((16, 2, 4, 8, 64), float(value), dtype=torch.bfloat16)] for value in (1, 0)]
    with kvxfer.Agent("prefill", options) as prefill, kvxfer.Agent("decode", options) as decode:
        region, target = (
            agent.register("kv", cache, kvxfer.KVLayout.from_tensors(cache, axes="b2thd"))
            for agent, cache in zip((prefill, decode), caches, strict=True)
        )
        remote = prefill.connect_blocking(decode.address, 10).region_blocking("kv", 10)
        incoming = decode.expect(b"req-42", [3, 4], target)
        after = torch.cuda.current_stream() if torch.cuda.is_available() else None
        group = kvxfer.Group([prefill.write(region, remote, [7, 9], [3, 4], notify=b"req-42", after=after)])
        if after is not None:
            incoming.wait_in(after, layer=0)
        for layer in incoming.layers:
            incoming.layer_blocking(layer, timeout_s=10)
        group.wait(timeout_s=10)
    arrived = caches[1][0]
    assert bool((arrived[[3, 4]] == 1).all())
    assert not bool(arrived[5].any())


if __name__ == "__main__":
    main()
