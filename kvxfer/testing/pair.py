"""Pairs of two connected agents with a cache each, for the contract checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.agent import Agent
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.memory.pool import Pool
from kvxfer.options import AgentOptions
from kvxfer.peer import Peer
from kvxfer.region import Region
from kvxfer.region_descriptor import RegionDescriptor

AXES: Final = "l2bthd"
# Layers, K and V, blocks, tokens, heads, dim: small pages; several fit in one piece.
SMALL: Final = (3, 2, 16, 4, 2, 32)
# Pages of 64 KiB, 24 MiB in all: transfers last long enough to be interrupted.
LARGE: Final = (4, 2, 48, 16, 16, 128)

_CONNECT_TIMEOUT_S = 30.0


@dataclass
class Cache:
    """One end: an agent, its cache, and its view of the other end.

    Attributes
    ----------
    array
        uint16 [layers, 2, blocks, tokens, heads, dim].
    """

    agent: Agent
    region: Region
    array: NDArray[np.uint16]
    peer: Peer

    @property
    def remote(self) -> RegionDescriptor:
        """The other end's cache."""
        return self.peer.regions["kv"]

    @property
    def num_layers(self) -> int:
        """Of the cache."""
        return int(self.array.shape[0])

    @property
    def num_blocks(self) -> int:
        """Of the cache."""
        return int(self.array.shape[2])

    def fill(self, seed: int) -> None:
        """Writes bytes that depend on the seed, the layer, K or V, the block and the position."""
        words, factor = self.array.reshape(-1), 2654435761 + 2 * seed
        # Part by part, in a processor's cache.
        part = np.arange(1 << 16, dtype=np.uint32) * np.uint32(factor)
        for at in range(0, len(words), len(part)):
            here = words[at : at + len(part)]
            here[:] = part[: len(here)] + np.uint32(at * factor % (1 << 32)) >> np.uint32(16)

    def blocks(self, ids: Any, layers: slice = slice(None)) -> NDArray[np.uint16]:
        """Returns a copy of blocks, [layers, 2, len(ids), tokens, heads, dim]."""
        return self.array[layers][:, :, np.asarray(ids, np.int64)].copy()


@dataclass
class Pair:
    """Two connected ends.

    Attributes
    ----------
    prefill, decode
        The two ends. Either may read, write and expect; the names follow the usual roles.
    lossy
        Whether rails may die, so that transfers may fail. Transfers must end in any case.
    seed
        Seed of random choices: print it if a check fails.
    """

    prefill: Cache
    decode: Cache
    lossy: bool = False
    seed: int = 1


@contextmanager
def connected_pair(
    options: AgentOptions | None = None,
    *,
    memory: str = "pool",
    shape: tuple[int, ...] = SMALL,
    lossy: bool = False,
    seed: int = 1,
) -> Iterator[Pair]:
    """Makes two agents in this process that are connected by sockets and the given transports.

    Parameters
    ----------
    options
        Options of both agents.
    memory
        ``"pool"``, or ``"foreign"`` for an array of numpy's own.
    shape
        Shape of the caches: layers, 2, blocks, tokens, heads, dim.
    lossy, seed
        Kept in the `Pair`.
    """
    options = options or AgentOptions()
    with (
        Agent("prefill", options) as prefill,
        Agent("decode", replace(options, listen="")) as decode,
    ):
        arrays = [_cache(memory, shape) for _ in range(2)]
        regions = [
            agent.register("kv", array, KVLayout.from_tensor(array, AXES))
            for agent, array in zip((prefill, decode), arrays, strict=True)
        ]
        to_prefill = decode.connect_blocking(prefill.address, _CONNECT_TIMEOUT_S)
        to_decode = prefill.accept_blocking("decode", _CONNECT_TIMEOUT_S)
        to_decode.region_blocking("kv", _CONNECT_TIMEOUT_S)
        yield Pair(
            Cache(prefill, regions[0], arrays[0], to_decode),
            Cache(decode, regions[1], arrays[1], to_prefill),
            lossy=lossy,
            seed=seed,
        )


def _cache(memory: str, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    if memory == "pool":
        num_blocks = shape[2]
        block_nbytes = int(np.prod(shape)) // num_blocks * 2
        return Pool(num_blocks, block_nbytes, huge_pages=False).array(shape, np.uint16)
    return np.zeros(shape, np.uint16)
