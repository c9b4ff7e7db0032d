"""Prefill's half of a hand-over between two hosts: computes a request, prints what decode needs, and waits.

    python prefill.py 10.0.0.7 | ssh 10.0.0.8 python decode.py

The argument is this host's address. The environment says which peers may connect, in both halves:
KVXFER_SECRET_FILE, or KVXFER_TLS_CERTIFICATE, KVXFER_TLS_KEY and KVXFER_TLS_AUTHORITIES.
docs/tutorials/two-hosts.md explains each step.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

import kvxfer

SHAPE = (4, 2, 64, 16, 8, 128)  # [layers, K and V, blocks, tokens, heads, dim]
BLOCK_NBYTES = 4 * 2 * 16 * 8 * 128 * 2  # one block in all layers, float16
LEASE_S = 60.0

# --8<-- [start:agent]
listen = f"tcp://{sys.argv[1]}:0"  # any free port; agent.address has it
with kvxfer.Pool(SHAPE[2], BLOCK_NBYTES) as pool, kvxfer.Agent("prefill-0", listen=listen) as agent:
    # --8<-- [end:agent]
    kv = pool.array(SHAPE, np.float16)
    region = agent.register("kv", kv, kvxfer.KVLayout.from_tensor(kv, axes="l2bthd"))
    blocks = pool.allocate(3, owner="req-42").ids
    kv[:, :, blocks] = np.random.default_rng().random((4, 2, 3, 16, 8, 128))  # the forward pass

    lease = region.grant("decode-0", blocks, mode="read", ttl_s=LEASE_S)
    digest = hashlib.sha256(kv[:, :, blocks].tobytes()).hexdigest()
    told = {"address": agent.address, "blocks": blocks.tolist(), "lease": str(lease.token), "digest": digest}
    print(json.dumps(told), flush=True)
    try:
        note = agent.notification_blocking(timeout_s=LEASE_S)
        outcome = f"{note.peer.name} has the pages"
    except TimeoutError:
        outcome = "decode did not read in time"
    lease.revoke_blocking()
    pool.free(blocks)
    print(f"prefill: {outcome}; the blocks are free", file=sys.stderr)
