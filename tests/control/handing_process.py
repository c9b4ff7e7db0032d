"""A process without an agent that hands memory over and obeys commands on stdin; tests kill it."""

from __future__ import annotations

import sys
import zlib

import numpy as np

from kvxfer import KVLayout
from kvxfer.control.handed.hand_over import hand_over, shared_array


def main(folder: str, name: str, seed: str, shape: str, axes: str) -> None:
    sizes = dict(zip("l2bthd", map(int, shape.split(",")), strict=True))
    memory = shared_array(tuple(sizes[axis] for axis in axes), np.uint16)
    memory[:] = np.random.default_rng(int(seed)).integers(0, 1 << 16, memory.shape, np.uint16)
    layout = KVLayout.from_tensor(memory, axes)
    handed = hand_over(memory, layout, name, daemon=folder)
    canonical = memory.transpose([axes.index(axis) for axis in "l2bthd"])
    print(handed.region, handed.agent, handed.incarnation, handed.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["sums", *blocks]:
                sums = [
                    zlib.crc32(np.ascontiguousarray(canonical[:, :, int(block)]).tobytes())
                    for block in blocks
                ]
                print(*sums, flush=True)
            case ["close"]:
                handed.close()
                print("closed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
