"""LMCache's NIXL channel, unchanged, on kvxfer's facade as ``nixl``: two processes that read from each other.

The tests' own process does not import LMCache; the two processes do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.etcd_server import free_ports

ROOT = Path(__file__).parents[2]
LMCACHE = Path(sys.prefix) / "lmcache"
BOUND_S = 120.0

# Performs the reads that its input names, line by line, and prints the results.
END = """
import json, sys, time
import numpy as np
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel.impl import nixl_impl
PAGE, PAGES = 4096, 256
url, fill = sys.argv[1], int(sys.argv[2])
memory = np.full(PAGE * PAGES, fill, np.uint8)
context = nixl_impl.create_nixl_transfer_channel_context(
    L1MemoryDesc(ptr=memory.ctypes.data, size=memory.nbytes, align_bytes=PAGE), url, url, backends=["UCX"]
)
print(json.dumps(nixl_impl._load_nixl()[0].__module__), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    try:
        client = context.get_transfer_channel_client(asked["from"])
        near, far = ([(page * PAGE, PAGE) for page in asked[end]] for end in ("near", "far"))
        place = context.get_transfer_channel_address
        task = client.submit_read(place(near), place(far))
        while not (result := client.query_read_status(task)).finished:
            time.sleep(0.001)
        ended = all(result.succeeded_mask)
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    pages = memory.reshape(PAGES, PAGE)
    print(json.dumps({"ended": ended, "filled": np.flatnonzero((pages != fill).all(1)).tolist()}), flush=True)
"""


class Peer:
    """One process with LMCache."""

    def __init__(self, url: str, fill: int) -> None:
        paths = (ROOT, ROOT / "connectors/nixl/distribution", LMCACHE)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "LMCACHE_LOG_LEVEL": "ERROR",
        }
        self.url = url
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", END, url, str(fill)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def told(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line[:1] in ('"', "{"):
                return json.loads(line)
        raise AssertionError(f"it ended with {self.process.wait(BOUND_S)}")

    def read(self, peer: Peer, near: list[int], far: list[int]) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"from": peer.url, "near": near, "far": far}) + "\n")
        self.process.stdin.flush()
        return self.told()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    if not LMCACHE.exists():
        pytest.skip("LMCache is not here: `make test-vllm` fetches it")
    with ExitStack() as stack:
        made = [
            stack.enter_context(Peer(f"127.0.0.1:{port}", fill))
            for fill, port in enumerate(free_ports(2), start=1)
        ]
        assert [peer.told() for peer in made] == ["kvxfer.connectors.nixl._api"] * 2
        yield made


def test_each_reads_from_the_other(peers: list[Peer]) -> None:
    one, other = peers
    assert one.read(other, [3, 9, 200], [0, 255, 17]) == {"ended": True, "filled": [3, 9, 200]}
    many = list(range(0, 256, 2))
    assert other.read(one, many, [page + 1 for page in many])["ended"] is True


def test_a_peer_that_is_killed_fails_its_reads(peers: list[Peer]) -> None:
    one, other = peers
    assert one.read(other, [0], [0])["ended"] is True
    other.process.kill()
    other.process.wait(BOUND_S)
    ended = one.read(other, [1], [1])
    # The error comes from the session, or from memory that no longer exists.
    assert "NIXL_ERR_" in str(ended["ended"])
    assert ended["filled"] == [0]
