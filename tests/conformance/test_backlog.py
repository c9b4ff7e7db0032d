"""Transfers beyond what may be open at a peer wait for their turn, in the order in which they were posted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvxfer import Agent, AgentOptions

BOUND_S = 60.0
COUNT = 200


@pytest.mark.parametrize("seed", range(3), indirect=True)
def test_who_is_cancelled_while_it_waits_leaves_the_others_in_their_order(seed: int) -> None:
    draw = random.Random(seed)
    with Agent("here", AgentOptions(max_transfers_per_peer=1)) as here, Agent("there") as there:
        source = here.register("kv", np.ones((16, 64), np.uint8))
        region = there.register("kv", np.zeros((16, 64), np.uint8))
        remote = here.connect_blocking(there.address).region_blocking("kv")
        region.grant(there.accept_blocking("here"), mode="write", ttl_s=600)
        first = here.write(source, remote, [0], [0], hold=True)
        waiting = [
            here.write(source, remote, [1], [1], notify=str(number).encode()) for number in range(COUNT)
        ]
        cancelled = draw.sample(range(COUNT), COUNT // 2)
        for number in cancelled:
            waiting[number].cancel()
            assert waiting[number].state == "cancelled", f"seed {seed}"
        first.mark_ready(1)
        kept = [number for number in range(COUNT) if number not in cancelled]
        for number in kept:
            waiting[number].wait(BOUND_S)
            assert there.notification_blocking(BOUND_S).payload == str(number).encode(), f"seed {seed}"
