"""An engine connector of one's own: LMDeploy's calls of a migration backend, by kvxfer.

    python lmdeploy_backend.py    # two processes stand for two engines, and call the backend as LMDeploy does

docs/connector-authors.md says which kind of connector an engine needs; docs/tutorials/own-connector.md
explains each step. LMDeploy passes pydantic messages, and the backend reads their fields alone, so this runs
without LMDeploy. It takes host memory, and has not run under LMDeploy.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import multiprocessing
import secrets
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvxfer

# LMDeploy names bytes by offset and length when it migrates. A region of kvxfer has blocks of one size, which
# is chosen at registration. 256 divides LMDeploy's offsets and lengths; adjacent blocks move as one piece.
BLOCK_NBYTES = 256


# --8<-- [start:backend]
class KvxferBackend:
    """One rank's backend: an agent, and for each remote engine a session."""

    def __init__(self) -> None:
        self._agent: kvxfer.Agent | None = None
        self._regions: dict[str, kvxfer.Region] = {}
        self._peers: dict[str, kvxfer.Peer] = {}
        self._granted: dict[str, list[kvxfer.Lease]] = {}  # to a remote engine
        self._tokens: dict[str, dict[str, kvxfer.LeaseToken]] = {}  # of a remote engine, by key of its memory

    def p2p_initialize(self, init_request: Any) -> None:
        """Makes this rank's agent, once."""
        if self._agent is None:
            name = f"{init_request.local_engine_id}/{init_request.rank}.{secrets.token_hex(4)}"
            self._agent = kvxfer.Agent(name)

    def register_memory_region(self, register_mr_request: Any) -> None:
        """Registers memory under its key, once: LMDeploy asks again for each remote engine."""
        key = str(register_mr_request.mr_key)
        if key in self._regions:
            return
        num_blocks = register_mr_request.length // BLOCK_NBYTES
        address = register_mr_request.addr + register_mr_request.offset
        memory = (ctypes.c_uint8 * (num_blocks * BLOCK_NBYTES)).from_address(address)
        blocks = np.ctypeslib.as_array(memory).reshape(num_blocks, 1, BLOCK_NBYTES)
        layout = kvxfer.KVLayout.from_tensors([blocks], "bhd", model=f"bytes of {key}", group=key)
        self._regions[key] = self._own.register(key, [blocks], layout)

    def endpoint_info(self, remote_engine_id: str, protocol: Any) -> str:
        """Returns what LMDeploy tells the other engine: where this agent is, and leases on all of its memory.

        LMDeploy itself knows which request owns which blocks, so a lease lasts until `p2p_drop_connect`. An
        agent that shows the token may read. LMDeploy tells it to that engine alone.
        """
        leases = {key: region.grant(None, ttl_s=math.inf) for key, region in self._regions.items()}
        self._granted.setdefault(remote_engine_id, []).extend(leases.values())
        tokens = {key: str(lease.token) for key, lease in leases.items()}
        return json.dumps({"entry": self._own.entry.to_dict(), "tokens": tokens})

    def p2p_connect(self, remote_engine_id: str, conn_req: Any) -> None:
        """Opens a session. The other engine may do so at the same time: tokens hold in either session."""
        told = json.loads(conn_req.endpoint_info)
        self._tokens[remote_engine_id] = {
            key: kvxfer.LeaseToken.parse(token) for key, token in told["tokens"].items()
        }
        entry = kvxfer.directory.Entry.from_dict(told["entry"])
        self._peers[remote_engine_id] = self._own.connect_blocking(entry)

    async def p2p_migrate(self, assignment: Any, async_op: bool = False) -> None:
        """Reads pieces of the other engine's memory into this engine's, or raises what has failed."""
        peer, tokens = self._peers[assignment.remote_engine_id], self._tokens[assignment.remote_engine_id]
        tables: dict[str, tuple[list[int], list[int]]] = {}
        for piece in assignment.batch:
            places = piece.target_offset, piece.source_offset, piece.length
            if any(each % BLOCK_NBYTES for each in places):
                raise ValueError(f"offsets and lengths are multiples of {BLOCK_NBYTES}: {piece}")
            src, dst = tables.setdefault(str(piece.mr_key), ([], []))
            # LMDeploy's target is the other engine: it is read, and LMDeploy's source is written.
            target, source, count = (each // BLOCK_NBYTES for each in places)
            src.extend(range(target, target + count))
            dst.extend(range(source, source + count))
        reads = [
            self._own.read(self._regions[key], peer.regions[key], src, dst, lease=tokens[key])
            for key, (src, dst) in tables.items()
        ]
        await kvxfer.Group(reads)  # when one fails the others are cancelled

    def p2p_drop_connect(self, remote_engine_id: str) -> None:
        """Ends the session and the leases: afterwards no byte of this memory is read."""
        if (peer := self._peers.pop(remote_engine_id, None)) is not None:
            peer.disconnect()
        for lease in self._granted.pop(remote_engine_id, []):
            lease.revoke_blocking()

    @property
    def _own(self) -> kvxfer.Agent:
        assert self._agent is not None, "p2p_initialize comes first"
        return self._agent
        # --8<-- [end:backend]


# --8<-- [start:engine]
def engine(name: str, other: str, lmdeploy: Connection) -> None:
    """Plays one engine: the calls in LMDeploy's order, with stand-ins for its messages."""
    cache = np.full(64 * 1024, 7 if name == "prefill" else 0, np.uint8)
    backend = KvxferBackend()
    backend.p2p_initialize(SimpleNamespace(local_engine_id=name, remote_engine_id=other, rank=0))
    place = {"addr": cache.ctypes.data, "offset": 0, "length": cache.nbytes}
    backend.register_memory_region(SimpleNamespace(mr_key=0, **place))
    lmdeploy.send(backend.endpoint_info(other, "RDMA"))
    backend.p2p_connect(other, SimpleNamespace(endpoint_info=lmdeploy.recv()))

    if name == "decode":
        piece = SimpleNamespace(mr_key=0, target_offset=4096, source_offset=0, length=1024)
        asyncio.run(backend.p2p_migrate(SimpleNamespace(remote_engine_id=other, batch=[piece])))
        assert (cache[:1024] == 7).all()
        assert not cache[1024:].any()
        print(f"decode: {piece.length} bytes came, and no byte more", flush=True)
        lmdeploy.send("migrated")
    else:
        lmdeploy.recv()
    backend.p2p_drop_connect(other)
    # --8<-- [end:engine]


def main() -> bool:
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Pipe()
    processes = [
        spawn.Process(target=engine, args=(*names, end), daemon=True)
        for names, end in zip((("prefill", "decode"), ("decode", "prefill")), ends, strict=True)
    ]
    for process, end in zip(processes, ends, strict=True):
        process.start()
        end.close()
    for process in processes:
        process.join()
    return all(process.exitcode == 0 for process in processes)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
