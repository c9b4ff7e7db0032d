import os
import socket
import threading

import numpy as np
import pytest

from kvxfer.bench import _limits
from kvxfer.bench.pages.pieces import Pieces
from kvxfer.bench.work.layout_names import NamedLayout
from kvxfer.bench.work.layout_pair import LayoutWork
from kvxfer.bench.work.rank_cache import RankCache, RankSpec
from tests.seeds import seed_of

# ---- names ----------------------------------------------------------------------------------------


def test_names_come_in_any_order_and_the_rest_has_defaults() -> None:
    assert NamedLayout.parse("hnd+TP4") == NamedLayout(4, "l2bhtd", "bfloat16", 16)
    assert NamedLayout.parse("p64+fp8") == NamedLayout(1, "l2bthd", "float8_e4m3fn", 64)


# ---- caches and their data ------------------------------------------------------------------------


def work_of(src: str, dst: str, layers: int = 2, tokens: int = 192) -> LayoutWork:
    return LayoutWork.of(src, dst, "Llama-3.1-70B", layers, tokens, seed=seed_of("blocks"))


def cache_of(spec: RankSpec) -> RankCache:
    return spec.place(np.zeros(spec.nbytes, np.uint8))


def test_one_wrong_bit_is_found_and_named() -> None:
    work = work_of("tp2", "tp2+hnd")
    cache, blocks = cache_of(work.dst), work.blocks(work.dst, -1)
    data = work.data()
    data.fill(cache, blocks)
    cache.part(1, 1)[blocks[2], 3, 1, 9] ^= 1
    wrong = data.check(cache, blocks)
    assert wrong.startswith("layer 1, v, token 35, head 1, dim 9 is 0x")
    assert "(1 of 98304 elements are wrong)" in wrong
    assert data.check(cache, blocks, range(1)) == ""
    assert data.check(cache, blocks, num_tokens=32) == ""


@pytest.mark.parametrize("axis", [0, 2], ids=["blocks", "heads"])
def test_elements_at_wrong_places_are_found(axis: int) -> None:
    work = work_of("tp2", "tp2")
    cache, blocks = cache_of(work.dst), work.blocks(work.dst, -1)
    data = work.data()
    data.fill(cache, blocks)
    part = cache.part(0, 0)
    part[:] = np.roll(part, 1, axis)
    assert data.check(cache, blocks).startswith("layer 0, k, token ")


# ---- pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("src", "dst"), [("tp4", "tp2+hnd"), ("fp8+tp2", "bf16+p64")])
def test_pieces_arrive_in_place_and_as_they_were(src: str, dst: str) -> None:
    work = work_of(src, dst)
    data, caches = work.data(), {src: cache_of(spec) for src, spec in work.srcs.items()}
    blocks = {src: work.blocks(spec, src) for src, spec in work.srcs.items()}
    for rank, cache in caches.items():
        data.fill(cache, blocks[rank])
    target, dst_blocks = cache_of(work.plain), work.blocks(work.dst, -1)
    ours, theirs = socket.socketpair()
    pieces = Pieces.of(work, caches, blocks, target, dst_blocks)
    described = pieces.described()
    with ours, theirs:
        assert described["nbytes"] == work.src_nbytes
        assert described["stream_nbytes"] == work.src_nbytes + 16 * described["pieces"]
        sender = threading.Thread(target=pieces.send, args=(ours,))
        sender.start()
        address = target.memory.ctypes.data
        _limits.recv_pieces(theirs.fileno(), address, target.memory.nbytes, described["stream_nbytes"])
        sender.join()
    assert data.as_bytes().check(target, dst_blocks) == ""


def test_piece_beyond_the_memory_is_refused() -> None:
    ours, theirs = socket.socketpair()
    memory = np.zeros(64, np.uint8)
    with ours, theirs:
        ours.sendall(np.array([60, 8], np.uint64).tobytes() + bytes(8))
        with pytest.raises(OSError, match="read") as caught:
            _limits.recv_pieces(theirs.fileno(), memory.ctypes.data, memory.nbytes, 24)
    assert os.strerror(caught.value.errno or 0) == "Bad message"
    assert not memory.any()
