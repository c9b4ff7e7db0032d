"""Decode's half of a hand-over between two hosts: reads from prefill what its line of JSON names.

    python prefill.py 10.0.0.7 | ssh 10.0.0.8 python decode.py

docs/tutorials/two-hosts.md explains each step.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

import kvxfer

SHAPE = (4, 2, 64, 16, 8, 128)  # [layers, K and V, blocks, tokens, heads, dim]
BLOCK_NBYTES = 4 * 2 * 16 * 8 * 128 * 2  # one block in all layers, float16

# --8<-- [start:agent]
told = json.loads(input())
with kvxfer.Pool(SHAPE[2], BLOCK_NBYTES) as pool, kvxfer.Agent("decode-0", listen="") as agent:
    kv = pool.array(SHAPE, np.float16)
    region = agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))
    blocks = pool.allocate(len(told["blocks"]), owner="req-42").ids
    peer = agent.connect_blocking(told["address"])  # PeerError, auth-failed, where the secrets differ
    transfer = agent.read(
        region,
        peer.region_blocking("kv"),
        src_blocks=told["blocks"],
        dst_blocks=blocks,
        lease=kvxfer.LeaseToken.parse(told["lease"]),
        notify=b"req-42",
        timeout_s=30,
    )
    transfer.wait()
    assert hashlib.sha256(kv[:, :, blocks].tobytes()).hexdigest() == told["digest"]
    proof = f"the certificate of {peer.identity}" if peer.identity else "the secret"
    pool.free(blocks)
    print(
        f"decode: {len(blocks)} blocks came by {transfer.rails[0]}, every byte right; prefill showed {proof}"
    )
    # --8<-- [end:agent]
