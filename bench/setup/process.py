"""The two processes of ``kvxfer bench setup``: one is connected to, one, which is told where, is measured.

Imports nothing at its top that the measured import would find already there.
"""

import json
import sys
import time
from typing import Any


def _make(name: str, transport: str) -> tuple[Any, Any]:
    import numpy as np

    import kvxfer

    agent = kvxfer.Agent(name, kvxfer.AgentOptions(transports=(transport,)))
    cache = np.zeros((1, 4, 4096), np.uint8)
    return agent, agent.register("kv", cache, kvxfer.KVLayout.from_tensor(cache, "lbd"))


def _serve(transport: str) -> None:
    agent, region = _make("far", transport)
    print(agent.address, flush=True)
    peer = agent.accept_blocking(timeout_s=30)
    region.grant(peer, mode="write", ttl_s=600)
    sys.stdin.read()
    agent.close()


def _measure(transport: str, address: str, idle_s: float) -> None:
    import resource

    import numpy as np

    page = resource.getpagesize()

    def rss_mib() -> float:
        with open("/proc/self/statm") as statm:  # noqa: PTH123 -- pathlib would be imported for it
            return int(statm.read().split()[1]) * page / 2**20

    rss = rss_mib()
    times = [time.perf_counter()]
    import kvxfer

    for name in kvxfer.__all__:  # names are resolved when they are first used
        getattr(kvxfer, name)
    times.append(time.perf_counter())
    agent = kvxfer.Agent("near", kvxfer.AgentOptions(transports=(transport,)))
    times.append(time.perf_counter())
    cache = np.zeros((1, 4, 4096), np.uint8)
    start = time.perf_counter()
    region = agent.register("kv", cache, kvxfer.KVLayout.from_tensor(cache, "lbd"))
    register_s = time.perf_counter() - start
    start = time.perf_counter()
    peer = agent.connect_blocking(address, 30)
    remote = peer.region_blocking("kv", 30)
    connect_s = time.perf_counter() - start
    # The lease follows the session; a page asked for before it would be refused.
    deadline = time.monotonic() + 30
    while True:
        start = time.perf_counter()
        try:
            agent.write(region, remote, [1], [2], timeout_s=10).wait(10)
            break
        except kvxfer.TransferError:
            if time.monotonic() > deadline:
                raise
    write_s = time.perf_counter() - start
    rss = rss_mib() - rss
    time.sleep(0.1)
    cpu_s, began = time.process_time(), time.perf_counter()
    time.sleep(idle_s)
    cpu_s, idle_s = time.process_time() - cpu_s, time.perf_counter() - began
    with open("/proc/self/status") as status:  # noqa: PTH123
        threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
    figures = {
        "import_ms": (times[1] - times[0]) * 1e3,
        "create_ms": (times[2] - times[1]) * 1e3,
        "register_ms": register_s * 1e3,
        "connect_ms": connect_s * 1e3,
        "first_write_ms": write_s * 1e3,
        "idle_cpu_cores": cpu_s / idle_s,
        "rss_mib": rss,
        "threads": threads - 1,
    }
    print(json.dumps(figures))
    agent.close()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    (_measure if "address" in told else _serve)(**told)
