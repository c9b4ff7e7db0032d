"""LMDeploy's five calls of a migration backend, by kvxfer: an example for authors of connectors.

docs/connector-authors.md explains it. LMDeploy passes pydantic messages, of which only fields are read, so a
test runs this without LMDeploy (tests/connectors/test_connector_examples.py). Host memory alone; it has not
run under LMDeploy.
"""

from __future__ import annotations

import ctypes
import json
import math
import secrets
from typing import Any

import numpy as np

import kvxfer

# LMDeploy names bytes by offset and length when it migrates. Blocks of a region have one size, which is said
# when it is registered: small ones fit all, and those side by side move as one piece.
BLOCK_NBYTES = 256


class KvxferBackend:
    """One rank's backend: an agent, and for each remote engine a session."""

    def __init__(self) -> None:
        self._agent: kvxfer.Agent | None = None
        self._regions: dict[str, kvxfer.Region] = {}
        self._peers: dict[str, kvxfer.Peer] = {}

    def p2p_initialize(self, init_request: Any) -> None:
        """Makes this rank's agent, once."""
        if self._agent is None:
            name = f"{init_request.local_engine_id}/{init_request.rank}.{secrets.token_hex(4)}"
            self._agent = kvxfer.Agent(name)

    def register_memory_region(self, register_mr_request: Any) -> None:
        """Registers memory under its key; one that another remote engine has brought about is the same."""
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
        """Returns what the other engine is told, by LMDeploy's own connection."""
        return json.dumps(self._own.entry.to_dict())

    def p2p_connect(self, remote_engine_id: str, conn_req: Any) -> None:
        """Opens a session, and lets the other engine read: LMDeploy says which blocks are whose."""
        entry = kvxfer.directory.Entry.from_dict(json.loads(conn_req.endpoint_info))
        peer = self._peers[remote_engine_id] = self._own.connect_blocking(entry)
        for region in self._regions.values():
            region.grant(peer, range(region.layout.num_blocks), ttl_s=math.inf)

    async def p2p_migrate(self, assignment: Any, async_op: bool = False) -> None:
        """Reads pieces of the other engine's memory into this one's. Raises what has failed, in words."""
        peer = self._peers[assignment.remote_engine_id]
        tables: dict[str, tuple[list[int], list[int]]] = {}
        for piece in assignment.batch:
            places = piece.target_offset, piece.source_offset, piece.length
            if any(each % BLOCK_NBYTES for each in places):
                raise ValueError(f"offsets and lengths are multiples of {BLOCK_NBYTES}: {piece}")
            src, dst = tables.setdefault(str(piece.mr_key), ([], []))
            # What LMDeploy calls the target is the other engine's, which is read.
            target, source, count = (each // BLOCK_NBYTES for each in places)
            src.extend(range(target, target + count))
            dst.extend(range(source, source + count))
        reads = [
            self._own.read(self._regions[key], peer.regions[key], src, dst)
            for key, (src, dst) in tables.items()
        ]
        for read in reads:
            await read

    def p2p_drop_connect(self, remote_engine_id: str) -> None:
        """Ends a session: leases end with it, and no byte moves by it any more."""
        if (peer := self._peers.pop(remote_engine_id, None)) is not None:
            peer.disconnect()

    @property
    def _own(self) -> kvxfer.Agent:
        assert self._agent is not None, "p2p_initialize comes first"
        return self._agent
