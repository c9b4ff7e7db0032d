"""The decode process of ``kvxfer bench handover``."""

from __future__ import annotations

import time

from kvxfer.bench.handover.prefill import HandoverEnd, tag
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.stats import MIB
from kvxfer.bench.work.page_data import Indices


class Decode(HandoverEnd):
    """Receives the pages of requests, says when it could begin, and checks every byte."""

    role = "decode"

    async def serve(self, asked: Message, blocks: Indices) -> Message:
        request, region = asked["request"], self.pages.cache.region
        incoming = self.agent.expect(tag(request), blocks, region=region, timeout_s=self.options.timeout_s)
        self.other.send("blocks", blocks=blocks.tolist())
        arrived_ns = []
        # Layer by layer, as a decode that starts early would wait.
        for layer in range(self.shape.num_layers):
            await incoming.layer(layer)
            arrived_ns.append(time.monotonic_ns())
        await incoming
        # Decode could begin now; instead every byte is checked, and the blocks are given back.
        may_start_ns = time.monotonic_ns()
        if self.options.corrupt and request == self.options.requests - 1:
            self.pages.corrupt(blocks)
        self.pages.check(request, blocks)
        ended_ns = incoming.stages.ended_ns
        nbytes = len(blocks) * self.shape.block_nbytes
        return {
            "nbytes": nbytes,
            # The last ones may have been in place before this loop came to look.
            "arrived_ns": [min(at, ended_ns) for at in arrived_ns],
            # Its tag is the notification: it came when every byte was in place.
            "notification_ns": ended_ns,
            "decode_may_start_ns": may_start_ns,
            "rails": list(incoming.rails),
            "words": f"{asked['tokens']} tokens, {nbytes / MIB:.0f} MiB, every byte checked",
        }
