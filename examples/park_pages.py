"""Prefill parks pages at the node's daemon and ends; decode finds them by their keys and reads them.

    python park_pages.py    # a daemon, then a prefill, then a decode, each a process; needs kvxfer[control]

docs/tutorials/park-pages.md explains each step.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvxfer
from kvxfer.control import Client, layout_digest, schema

SHAPE = (4, 2, 64, 16, 8, 128)  # [layers, K and V, blocks, tokens, heads, dim]
PROMPT = "You are a helpful assistant. " * 12
NUM_PAGES = 3


# --8<-- [start:keys]
def keys_of(prompt: str) -> list[str]:
    """Returns a key for each page: a hash of all of the prompt up to the page's end."""
    ends = [len(prompt) * (page + 1) // NUM_PAGES for page in range(NUM_PAGES)]
    return [hashlib.sha256(prompt[:end].encode()).hexdigest() for end in ends]
    # --8<-- [end:keys]


# --8<-- [start:prefill]
def prefill(api: str) -> None:
    kv = np.zeros(SHAPE, np.float16)
    blocks = [7, 9, 30]
    kv[:, :, blocks] = computed()
    with Client(api) as daemon, kvxfer.Agent("prefill-0") as agent:
        region = agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))
        with region.grant(None, blocks, mode="read", ttl_s=30) as lease:  # None: the token is enough
            done = daemon.park_pages(
                schema.ParkRequest(
                    model="llama",
                    keys=keys_of(PROMPT),
                    agent=agent.address,
                    region="kv",
                    blocks=blocks,
                    lease=str(lease.token),
                )
            )
    print("prefill:", ", ".join(page.state for page in done.pages), "- and it ends", flush=True)
    # --8<-- [end:prefill]


# --8<-- [start:decode]
def decode(api: str) -> None:
    kv = np.zeros(SHAPE, np.float16)
    layout = kvxfer.KVLayout.from_tensor(kv, axes="l2bthd")
    keys = keys_of(PROMPT)
    with Client(api) as daemon, kvxfer.Agent("decode-0") as agent:
        region = agent.register("kv", kv, layout)
        wanted = schema.PageLeaseRequest(
            model="llama", layout=layout_digest(layout), keys=keys, holder="decode-0"
        )
        found = daemon.lease_pages(wanted)
        for part in found.parts:  # pages of one region each; none where every page is missing
            remote = part.descriptor()
            agent.connect_blocking(remote)
            into = [keys.index(key) for key in part.keys]
            agent.read(region, remote, part.blocks, into, lease=part.lease(), timeout_s=20).wait()
        daemon.revoke_page_lease(found.id)  # the pool may evict them again
    assert np.array_equal(kv[:, :, :NUM_PAGES], computed())
    print(f"decode: {NUM_PAGES - len(found.missing)} of {NUM_PAGES} pages came, every byte right", flush=True)
    # --8<-- [end:decode]


def computed() -> NDArray[Any]:
    """Returns what the model computes of the prompt's pages."""
    return np.random.default_rng(42).random((4, 2, NUM_PAGES, 16, 8, 128)).astype(np.float16)


# --8<-- [start:daemon]
@contextmanager
def daemon(folder: Path) -> Iterator[str]:
    """Runs ``kvxfer serve`` for a try: 64 MiB for pages, REST over a unix socket alone."""
    places = ["--runtime", f"{folder}/run", "--state", f"{folder}/state", "--listen", ""]
    command = [sys.executable, "-m", "kvxfer", "serve", *places, "--pool-gib", "0.0625"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while not said.endswith("ready\n"):
                if not (line := process.stderr.readline()):
                    sys.exit(said)
                said += line
            yield f"{folder}/run/api.sock"
        finally:
            process.terminate()
            # --8<-- [end:daemon]


def main() -> bool:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvxfer-") as folder, daemon(Path(folder)) as api:
        for engine in (prefill, decode):
            process = spawn.Process(target=engine, args=(api,), daemon=True)
            process.start()
            process.join()
            if process.exitcode != 0:
                return False
    return True


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
