"""A process that reads leased pages and keeps its lease; its test kills it."""

from __future__ import annotations

import sys
import time

from kvxfer import LeaseToken, RegionDescriptor
from tests.control.engines import Engine, options


def main(name: str, token: str, region: str, blocks: str, transport: str) -> None:
    engine = Engine(name, agent_options=options(transport or None))
    remote = RegionDescriptor.from_bytes(region.encode())
    ids = [int(block) for block in blocks.split(",")]
    engine.agent.connect_blocking(remote, 30.0)
    lease = LeaseToken.parse(token)
    while True:
        engine.agent.read(engine.region, remote, ids, range(len(ids)), lease=lease).wait(30.0)
        print(*engine.sums(range(len(ids))), flush=True)
        time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
