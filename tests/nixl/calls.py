"""A random program of calls, run on whatever ``nixl`` is: what it returned, raised and moved, as JSON lines.

Run as a script by NIXL's own environment (arguments: seeds, a backend), and called by the tests on kvxfer's.
Both agents are in one process and are called in turn, so neither needs a thread.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

import numpy as np

NUM_BLOCKS, BLOCK_NBYTES, NUM_TENSORS = 16, 256, 3
BOUND_S = 60.0


def outcome(call: Any) -> Any:
    """Returns what a call returns, or the name of what it raises."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


class Pair:
    """Two agents with some tensors each."""

    def __init__(self, api: Any, seed: int, backend: str) -> None:
        self.backend = backend
        self.random = random.Random(seed)
        config = api.nixl_agent_config(backends=[backend], enable_prog_thread=False)
        self.agents = {name: api.nixl_agent(f"{name}-{seed}", config) for name in ("a", "b")}
        generator = np.random.default_rng(seed)
        nbytes = NUM_BLOCKS * BLOCK_NBYTES
        self.memory = {
            name: [generator.integers(0, 256, nbytes, np.uint8) for _ in range(NUM_TENSORS)]
            for name in ("a", "b")
        }
        self.registered = {
            name: agent.register_memory([(t.ctypes.data, nbytes, 0, "") for t in self.memory[name]], "DRAM")
            for name, agent in self.agents.items()
        }
        self.known = False

    def other(self, name: str) -> str:
        return "b" if name == "a" else "a"

    def blocks(self, name: str, places: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
        rows = [(self.memory[name][t].ctypes.data + b * BLOCK_NBYTES, BLOCK_NBYTES, 0) for t, b in places]
        return np.array(rows, np.uint64).reshape(-1, 3)

    def wait(self, name: str, handle: Any) -> Any:
        """Polls both ends until a transfer has ended; keeps the other end's notifications."""
        until = time.monotonic() + BOUND_S
        while time.monotonic() < until:
            state = outcome(lambda: self.agents[name].check_xfer_state(handle))
            if state != "PROC":
                return state
            self.agents[self.other(name)].update_notifs()
        return "hangs"

    def told(self, name: str, wanted: bytes) -> bool:
        until = time.monotonic() + BOUND_S
        while time.monotonic() < until:
            if self.agents[name].check_remote_xfer_done(self.agents[self.other(name)].name, wanted):
                return True
            self.agents[self.other(name)].update_notifs()
        return False

    def step(self, number: int) -> Any:
        """Returns what one random call did."""
        name = self.random.choice("ab")
        agent, far = self.agents[name], self.agents[self.other(name)]
        kind = self.random.choice(
            (
                "prepped",
                "prepped",
                "prepped",
                "whole",
                "notify",
                "notify",
                "twice",
                "outside",
                "unequal",
                "unknown",
                "lists",
                "rest",
            )
        )
        write = self.random.random() < 0.5
        operation = "WRITE" if write else "READ"
        places = [(t, b) for t in range(NUM_TENSORS) for b in range(NUM_BLOCKS)]
        count = self.random.randint(1, 24)
        near, distant = self.random.sample(places, count), self.random.sample(places, count)
        tag = f"{number}-{operation}".encode()
        if kind == "prepped":
            lists = (
                agent.prep_xfer_dlist("", self.blocks(name, places), "DRAM"),
                agent.prep_xfer_dlist(far.name, self.blocks(self.other(name), places), "DRAM"),
            )
            chosen = [[places.index(place) for place in side] for side in (near, distant)]
            handle = agent.make_prepped_xfer(operation, lists[0], chosen[0], lists[1], chosen[1], tag)
            agent.transfer(handle)
            result: list[Any] = [self.wait(name, handle), self.told(self.other(name), tag)]
            agent.release_xfer_handle(handle)
            return [kind, *result]
        if kind in ("whole", "twice"):
            descs = (
                agent.get_xfer_descs(self.blocks(name, near), "DRAM"),
                agent.get_xfer_descs(self.blocks(self.other(name), distant), "DRAM"),
            )
            handle = agent.initialize_xfer(operation, *descs, far.name, tag)
            result = []
            for _ in range(1 if kind == "whole" else 2):
                agent.transfer(handle)
                result += [self.wait(name, handle), self.told(self.other(name), tag)]
            return [kind, *result]
        if kind == "notify":
            agent.send_notif(far.name, tag)
            return [kind, self.told(self.other(name), tag)]
        if kind == "outside":
            rows = self.blocks(name, near)
            rows[-1][0] += np.uint64(1 << 40)
            return [
                kind,
                outcome(lambda: agent.prep_xfer_dlist(self.random.choice(["", far.name]), rows, "DRAM")),
            ]
        if kind == "unequal":
            wrong_lists = [
                agent.prep_xfer_dlist("", self.blocks(name, near), "DRAM"),
                agent.prep_xfer_dlist(far.name, self.blocks(self.other(name), distant), "DRAM"),
            ]
            wrong = self.random.choice(([0], [count], [-1], []))
            return [
                kind,
                outcome(
                    lambda: agent.make_prepped_xfer(operation, wrong_lists[0], [0, 0], wrong_lists[1], wrong)
                ),
            ]
        if kind == "unknown":
            calls = (
                lambda: agent.prep_xfer_dlist("nobody", self.blocks(name, near), "DRAM"),
                lambda: agent.make_connection("nobody"),
                lambda: agent.send_notif("nobody", b"1"),
                lambda: agent.remove_remote_agent("nobody"),
                lambda: agent.add_remote_agent(b"no metadata"),
                lambda: agent.add_remote_agent(agent.get_agent_metadata()),
                lambda: agent.check_remote_metadata("nobody"),
                lambda: agent.deregister_memory(agent.get_reg_descs([(1 << 20, 5, 0, "")], "DRAM")),
                lambda: agent.create_backend(self.backend),
                lambda: agent.create_backend("nobody"),
                lambda: agent.query_memory([(1, 2, 0, "")], self.backend, "DRAM"),
                lambda: agent.get_xfer_descs([(1, 2)], "DRAM"),
                lambda: agent.get_xfer_descs([(1, 2, 3)]),
            )
            which = self.random.randrange(len(calls))
            return [kind, which, outcome(calls[which])]
        if kind == "lists":
            tuples = [(self.random.randrange(1 << 40), self.random.randrange(1 << 20), 0) for _ in range(4)]
            descs = agent.get_xfer_descs(tuples, "DRAM")
            descs.append((1, 2, 3))
            descs.remDesc(self.random.randrange(5))
            back = agent.deserialize_descs(agent.get_serialized_descs(descs))
            return [
                *(kind, descs.descCount(), descs.isEmpty(), back == descs, [descs[i] for i in range(4)]),
                outcome(lambda: descs.index((9, 9, 9))),
                outcome(lambda: descs.remDesc(17)),
                agent.check_remote_metadata(far.name),
                agent.check_remote_metadata(
                    far.name, agent.get_xfer_descs(self.blocks(self.other(name), distant), "DRAM")
                ),
            ]
        return [kind, agent.get_new_notifs(), agent.estimate_xfer_cost, None][:2]


def run(api: Any, seed: int, backend: str = "UCX", num_steps: int = 12) -> list[Any]:
    """Returns what a program did, and a checksum of all memory after each step."""
    pair = Pair(api, seed, backend)
    a, b = pair.agents["a"], pair.agents["b"]
    out: list[Any] = [
        [
            name.decode()
            for name in (
                a.add_remote_agent(b.get_agent_metadata()),
                b.add_remote_agent(a.get_agent_metadata()),
            )
        ]
    ]
    for number in range(num_steps):
        out.append(pair.step(number))
        out.append(
            [
                int(np.bitwise_xor.reduce(t.view(np.uint64) * np.arange(1, len(t) // 8 + 1, dtype=np.uint64)))
                for name in "ab"
                for t in pair.memory[name]
            ]
        )
    for name, agent in pair.agents.items():
        agent.deregister_memory(pair.registered[name])
        agent.remove_remote_agent(pair.agents[pair.other(name)].name)
    done: list[Any] = json.loads(
        json.dumps(out, default=lambda value: value.decode() if isinstance(value, bytes) else str(value))
    )
    return done


if __name__ == "__main__":
    import nixl._api  # type: ignore[import-not-found]

    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(run(nixl._api, seed, sys.argv[3] if len(sys.argv) > 3 else "UCX")), flush=True)
    os._exit(0)  # NIXL's own end may crash
