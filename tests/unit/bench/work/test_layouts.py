import os
import socket
import threading

import ml_dtypes
import numpy as np
import pytest

from kvxfer.bench import _limits
from kvxfer.bench.pages.pieces import Pieces
from kvxfer.bench.work.layout_names import NamedLayout
from kvxfer.bench.work.layout_pair import LayoutWork
from kvxfer.bench.work.rank_cache import STAND_INS, RankCache, RankSpec
from tests.seeds import seed_of

REAL = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


# ---- names ----------------------------------------------------------------------------------------


def test_names_come_in_any_order_and_the_rest_has_defaults() -> None:
    assert NamedLayout.parse("hnd+TP4") == NamedLayout(4, "l2bhtd", "bfloat16", 16)
    assert NamedLayout.parse("p64+fp8") == NamedLayout(1, "l2bthd", "float8_e4m3fn", 64)


# ---- caches and their data ------------------------------------------------------------------------


def work_of(src: str, dst: str, layers: int = 2, tokens: int = 192) -> LayoutWork:
    return LayoutWork.of(src, dst, "Llama-3.1-70B", layers, tokens, seed=seed_of("blocks"))


def cache_of(spec: RankSpec) -> RankCache:
    return spec.place(np.zeros(spec.nbytes, np.uint8))


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_filled_cache_passes_its_own_check(name: str) -> None:
    work = work_of(f"tp2+{name}", f"tp2+hnd+{name}")
    cache, blocks = cache_of(work.dst), work.blocks(work.dst, -1)
    work.data().fill(cache, blocks)
    assert work.data().check(cache, blocks) == ""


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


def reindexed(work: LayoutWork) -> RankCache:
    """Returns the destination as plain ml_dtypes and numpy make it of the sources, element by element."""
    data, dst = work.data(), cache_of(work.dst)
    dst_blocks = work.blocks(work.dst, -1)
    for share in work.shares:
        spec = work.srcs[share.src]
        src, src_blocks = cache_of(spec), work.blocks(spec, share.src)
        data.fill(src, src_blocks)
        for layer in share.layers:
            for kv in range(2):
                stored = src.part(layer, kv)[src_blocks]
                tokens = stored.reshape(work.num_tokens, len(spec.heads), -1).view(REAL[spec.named.dtype])
                values = tokens.astype(np.float32)
                if spec.scale is not None:
                    values = values * spec.scale
                if work.dst.scale is not None:
                    values = values / work.dst.scale
                heads = slice(share.heads.start - spec.heads.start, share.heads.stop - spec.heads.start)
                dtype = work.dst.named.dtype
                out = values[:, heads].astype(REAL[dtype]).view(STAND_INS[dtype])
                first = share.heads.start - work.dst.heads.start
                pages = out.reshape(-1, work.dst.named.block_tokens, *out.shape[1:])
                dst.part(layer, kv)[dst_blocks, :, first : first + len(share.heads)] = pages
    return dst


@pytest.mark.parametrize(
    ("src", "dst"),
    [("tp4", "tp2"), ("tp2", "tp4+hnd"), ("tp1", "tp8+p64"), ("bf16", "fp8"), ("fp8+p64", "bf16+hnd")],
)
def test_check_agrees_with_conversions_done_by_hand(src: str, dst: str) -> None:
    work = work_of(src, dst)
    cache = reindexed(work)
    assert work.data().check(cache, work.blocks(work.dst, -1)) == ""


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
