"""Drives NIXL's own agents over kvxfer's plug-in; run by NIXL's own environment, with NIXL_PLUGIN_DIR set.

Prints one JSON object: what each step gave.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

BOUND_S = 60.0
BACKEND = sys.argv[1]
said: dict[str, Any] = {}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error).__name__


def made(name: str, nbytes: int) -> tuple[Any, Any, Any]:
    agent = nixl_agent(name, nixl_agent_config(backends=[BACKEND], enable_prog_thread=False))
    memory = np.random.default_rng(len(name)).integers(0, 256, nbytes, np.uint8)
    registered = agent.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM", backends=[BACKEND])
    return agent, memory, registered


def wait(agent: Any, handle: Any) -> str:
    until = time.monotonic() + BOUND_S
    while time.monotonic() < until:
        state: str = outcome(lambda: agent.check_xfer_state(handle))
        if state != "PROC":
            return state
    return "hangs"


def told(agent: Any, name: str, wanted: bytes) -> bool:
    until = time.monotonic() + BOUND_S
    while time.monotonic() < until:
        if agent.check_remote_xfer_done(name, wanted):
            return True
    return False


near, ours, near_registered = made("near", 1 << 20)
far, theirs, far_registered = made("far", 1 << 20)
said["plugins"] = BACKEND in near.get_plugin_list()
said["mem_types"] = near.get_backend_mem_types(BACKEND)
said["params"] = sorted(near.get_plugin_params(BACKEND))
said["names"] = [
    near.add_remote_agent(far.get_agent_metadata()).decode(),
    far.add_remote_agent(near.get_agent_metadata()).decode(),
]
said["connects"] = outcome(lambda: near.make_connection("far"))
count = 200
rows = [
    np.array([(m.ctypes.data + i * 4096, 4096, 0) for i in range(256)], np.uint64) for m in (ours, theirs)
]
lists = near.prep_xfer_dlist("", rows[0], "DRAM"), near.prep_xfer_dlist("far", rows[1], "DRAM")
order = np.random.default_rng(1)
for operation in ("WRITE", "READ"):
    chosen = [order.permutation(256)[:count].astype(np.int32) for _ in range(2)]
    before = [m.reshape(256, -1).copy() for m in (ours, theirs)]
    handle = near.make_prepped_xfer(operation, lists[0], chosen[0], lists[1], chosen[1], operation.encode())
    said[f"backend of {operation}"] = near.query_xfer_backend(handle)
    for _ in range(2):  # again
        near.transfer(handle)
        said[operation] = [wait(near, handle), told(far, "near", operation.encode())]
    if operation == "WRITE":
        said["bytes of WRITE"] = bool((theirs.reshape(256, -1)[chosen[1]] == before[0][chosen[0]]).all())
    else:
        said["bytes of READ"] = bool((ours.reshape(256, -1)[chosen[0]] == before[1][chosen[1]]).all())
    near.release_xfer_handle(handle)
near.send_notif("far", b"alone")
said["notification"] = told(far, "near", b"alone")
itself = near.initialize_xfer(
    "WRITE",
    near.get_xfer_descs(rows[0][:1], "DRAM"),
    near.get_xfer_descs(rows[0][1:2], "DRAM"),
    "near",
    b"own",
)
near.transfer(itself)
said["within"] = [
    wait(near, itself),
    bool((ours[:4096] == ours[4096:8192]).all()),
    told(near, "near", b"own"),
]
partial = far.get_partial_agent_metadata(far_registered, inc_conn_info=True, backends=[BACKEND])
said["partial"] = near.add_remote_agent(partial).decode()
said["outside"] = outcome(
    lambda: near.prep_xfer_dlist("far", [(theirs.ctypes.data + (1 << 20), 8, 0)], "DRAM")
)
last = near.make_prepped_xfer("READ", lists[0], [0], lists[1], [0])
far.deregister_memory(far_registered)
said["deregistered"] = outcome(lambda: [near.transfer(last), wait(near, last)][1])
said["cost"] = outcome(lambda: near.estimate_xfer_cost(last))
said["query"] = outcome(lambda: near.query_memory([(ours.ctypes.data, 8, 0, "")], BACKEND, "DRAM"))
near.remove_remote_agent("far")
said["removed"] = outcome(lambda: near.transfer(last))
near.deregister_memory(near_registered)
print(json.dumps(said), flush=True)
os._exit(0)  # NIXL's own end may crash
