"""Examples for authors of connectors (docs/connector-authors.md), run without their engines."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvxfer

EXAMPLE = Path(__file__).parents[2] / "examples" / "lmdeploy_backend.py"
PIECE_NBYTES, NUM_PIECES = 1024, 16


@dataclass
class Engine:
    """One rank of LMDeploy, as far as its backend sees it."""

    name: str
    backend: Any
    cache: NDArray[np.uint8]


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode that are connected in the way LMDeploy does it."""
    spec = importlib.util.spec_from_file_location("lmdeploy_backend", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    both = []
    for at, name in enumerate(("prefill", "decode")):
        cache = np.random.default_rng(at).integers(0, 256, PIECE_NBYTES * NUM_PIECES, np.uint8)
        both.append(Engine(name, module.KvxferBackend(), cache))
    prefill, decode = both
    for own, other in ((prefill, decode), (decode, prefill)):
        asked = SimpleNamespace(local_engine_id=own.name, remote_engine_id=other.name, rank=0)
        own.backend.p2p_initialize(asked)
        region = SimpleNamespace(mr_key=0, addr=own.cache.ctypes.data, offset=0, length=own.cache.nbytes)
        own.backend.register_memory_region(region)
    infos = {each.name: each.backend.endpoint_info("", "RDMA") for each in both}
    for own, other in ((prefill, decode), (decode, prefill)):
        own.backend.p2p_connect(other.name, SimpleNamespace(endpoint_info=infos[other.name]))
    yield prefill, decode
    for each in both:
        each.backend._agent.close()


def assignment(pieces: list[tuple[int, int]], length: int = PIECE_NBYTES) -> SimpleNamespace:
    """Returns the pieces that decode fetches: pairs of prefill's piece and its own."""
    batch = []
    for src, dst in pieces:
        places = {"target_offset": src * PIECE_NBYTES, "source_offset": dst * PIECE_NBYTES}
        batch.append(SimpleNamespace(mr_key=0, length=length, **places))
    return SimpleNamespace(remote_engine_id="prefill", protocol="RDMA", batch=batch)


async def test_lmdeploys_calls_bring_the_pieces_that_it_names(
    engines: tuple[Engine, Engine], seed: int
) -> None:
    prefill, decode = engines
    random_ = random.Random(seed)
    pieces = list(
        zip(random_.sample(range(NUM_PIECES), 5), random_.sample(range(NUM_PIECES), 5), strict=True)
    )
    expected = decode.cache.copy().reshape(NUM_PIECES, PIECE_NBYTES)
    for src, dst in pieces:
        expected[dst] = prefill.cache.reshape(NUM_PIECES, PIECE_NBYTES)[src]
    await decode.backend.p2p_migrate(assignment(pieces))
    assert np.array_equal(decode.cache.reshape(NUM_PIECES, PIECE_NBYTES), expected)


async def test_what_fails_is_raised_in_words(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    with pytest.raises(ValueError, match="multiples of 256"):
        await decode.backend.p2p_migrate(assignment([(0, 0)], length=100))
    prefill.backend._agent.close()
    with pytest.raises(kvxfer.KvxferError):
        await decode.backend.p2p_migrate(assignment([(0, 0)]))
    decode.backend.p2p_drop_connect("prefill")
    with pytest.raises(KeyError):
        await decode.backend.p2p_migrate(assignment([(0, 0)]))
