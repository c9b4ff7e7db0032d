"""Checks with different layouts at the two ends, which every transport must pass.

The caches of a pair are registered again under other layouts: the same memory, divided differently. Plain
numpy computes what must arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.quantization import Quantization
from kvxfer.region import Region
from kvxfer.region_descriptor import RegionDescriptor
from kvxfer.testing.conformance import BOUND_S, MakePair, end_of, raises, settle
from kvxfer.testing.pair import Cache, Pair

# Layers, K and V, blocks, tokens, heads, dim. Rows of one head are 64 bytes, a page 8 KiB, so that a
# transfer has several pieces of many short runs.
SHAPE: Final = (2, 2, 96, 16, 4, 32)
_LAYERS, _KV, _BLOCKS, _TOKENS, _HEADS, _DIM = SHAPE


@dataclass
class View:
    """One end's memory under a layout.

    Attributes
    ----------
    array
        The end's cache memory, with axes in the order of `axes`.
    """

    cache: Cache
    array: NDArray[Any]
    region: Region
    name: str

    @classmethod
    def make(cls, cache: Cache, name: str, array: NDArray[Any], axes: str, **layout: Any) -> View:
        memory = [array, layout["scales"]] if "scales" in layout else array
        region = cache.agent.register(name, memory, KVLayout.from_tensor(array, axes, **layout))
        return cls(cache, array, region, name)

    def seen_by(self, other: Cache) -> RegionDescriptor:
        return other.peer.region_blocking(self.name, BOUND_S)


def both_ways(pair: Pair, src: View, dst: View, move: Callable[[View, View, str], Any]) -> None:
    """Calls `move` with a write and with a read from `src` to `dst`; `move` checks what arrived."""
    for verb in ("write", "read"):
        move(src, dst, verb)


def post(pair: Pair, src: View, dst: View, verb: str, src_blocks: Any, dst_blocks: Any, **how: Any) -> bool:
    """Moves blocks under a lease; returns whether they arrived (only a lossy pair may fail)."""
    if verb == "write":
        lease = dst.region.grant(dst.cache.peer, None, "write")
        work = src.cache.agent.write(
            src.region, dst.seen_by(src.cache), src_blocks, dst_blocks, lease=lease.token, **how
        )
    else:
        lease = src.region.grant(src.cache.peer, None, "read")
        work = dst.cache.agent.read(
            dst.region, src.seen_by(dst.cache), src_blocks, dst_blocks, lease=lease.token, **how
        )
    done = settle(pair, work)
    lease.revoke_blocking()
    return done


def tables(pair: Pair, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    random = np.random.default_rng(pair.seed)
    return random.permutation(_BLOCKS)[:count], random.permutation(_BLOCKS)[:count]


def check_heads_and_tokens_change_places(make_pair: MakePair) -> None:
    """Tokens before heads at one end, heads before tokens at the other."""
    with make_pair(SHAPE) as pair:
        src = View.make(pair.prefill, "nhd", pair.prefill.array, "l2bthd")
        turned = pair.decode.array.reshape(_LAYERS, _KV, _BLOCKS, _HEADS, _TOKENS, _DIM)
        dst = View.make(pair.decode, "hnd", turned, "l2bhtd")
        pair.prefill.fill(31)

        def move(src: View, dst: View, verb: str) -> None:
            dst.array[...] = 7
            from_ids, to_ids = tables(pair, 80)
            if not post(pair, src, dst, verb, from_ids, to_ids, integrity=True):
                return
            wanted = np.full_like(dst.array, 7)
            wanted[:, :, to_ids] = src.array[:, :, from_ids].swapaxes(3, 4)
            np.testing.assert_array_equal(dst.array, wanted)

        both_ways(pair, src, dst, move)


def check_two_ranks_fill_one(make_pair: MakePair) -> None:
    """An expectation is done when both halves of the heads have arrived, and not before."""
    with make_pair(SHAPE) as pair:
        halves = pair.prefill.array.reshape(2, _LAYERS, _KV, _BLOCKS, _TOKENS, _HEADS // 2, _DIM)
        ranks = [
            View.make(
                pair.prefill,
                f"rank-{i}",
                halves[i],
                "l2bthd",
                first_head=i * _HEADS // 2,
                total_heads=_HEADS,
            )
            for i in range(2)
        ]
        dst = View.make(pair.decode, "whole", pair.decode.array, "l2bthd")
        pair.prefill.fill(32)
        from_ids, to_ids = tables(pair, 60)
        for order in ((0, 1), (1, 0)):
            dst.array[...] = 7
            incoming = pair.decode.agent.expect(b"both", to_ids, dst.region, timeout_s=BOUND_S)
            for rank in order:
                src = ranks[rank]
                work = src.cache.agent.write(
                    src.region, dst.seen_by(src.cache), from_ids, to_ids, notify=b"both", timeout_s=BOUND_S
                )
                if not settle(pair, work):
                    incoming.cancel()
                    end_of(incoming)
                    return
                if rank == order[0]:
                    assert incoming.state == "pending", "half of the heads completed an expectation"
            assert end_of(incoming) is None
            wanted = np.full_like(dst.array, 7)
            for rank in order:
                first = rank * _HEADS // 2
                wanted[:, :, to_ids, :, first : first + _HEADS // 2] = halves[rank][:, :, from_ids]
            np.testing.assert_array_equal(dst.array, wanted)


def check_pages_of_unequal_size(make_pair: MakePair) -> None:
    """Pages of 16 tokens into pages of 24 and of 64: all tokens, and an odd part."""
    with make_pair(SHAPE) as pair:
        src = View.make(pair.prefill, "p16", pair.prefill.array, "l2bthd")
        pair.prefill.fill(33)
        for page in (24, 64):
            num_blocks = _BLOCKS * _TOKENS // page
            array = pair.decode.array.reshape(_LAYERS, _KV, num_blocks, _HEADS, page, _DIM)
            dst = View.make(pair.decode, f"p{page}", array, "l2bhtd")
            random = np.random.default_rng(pair.seed)
            to_ids = random.permutation(num_blocks)
            from_ids = random.permutation(_BLOCKS)
            rows = src.array[:, :, from_ids].reshape(_LAYERS, _KV, -1, _HEADS, _DIM)
            for tokens in (None, range(5, 1003), range(700, 701)):
                for verb in ("write", "read"):
                    dst.array[...] = 7
                    if not post(pair, src, dst, verb, from_ids, to_ids, tokens=tokens):
                        continue
                    moved = tokens or range(_BLOCKS * _TOKENS)
                    wanted = np.full((_LAYERS, _KV, num_blocks * page, _HEADS, _DIM), 7, np.uint16)
                    wanted[:, :, moved.start : moved.stop] = rows[:, :, moved.start : moved.stop]
                    got = dst.array[:, :, to_ids].swapaxes(3, 4).reshape(wanted.shape)
                    np.testing.assert_array_equal(got, wanted, f"{page} {tokens} {verb}")
            dst.region.deregister_blocking()


def check_a_part_of_a_block_completes_what_needs_no_more(make_pair: MakePair) -> None:
    """If a request's last block is partly filled, its expectation names the tokens."""
    with make_pair(SHAPE) as pair:
        src = View.make(pair.prefill, "part", pair.prefill.array, "l2bthd")
        dst = View.make(pair.decode, "part", pair.decode.array, "l2bthd")
        pair.prefill.fill(34)
        dst.array[...] = 7
        from_ids, to_ids = tables(pair, 3)
        tokens = range(16, 41)
        incoming = pair.decode.agent.expect(b"part", to_ids, dst.region, tokens=tokens, timeout_s=BOUND_S)
        work = pair.prefill.agent.write(
            src.region,
            dst.seen_by(pair.prefill),
            from_ids,
            to_ids,
            tokens=tokens,
            notify=b"part",
            timeout_s=BOUND_S,
        )
        if not settle(pair, work):
            incoming.cancel()
            end_of(incoming)
            return
        assert end_of(incoming) is None
        wanted = np.full_like(dst.array, 7)
        wanted[:, :, to_ids[1]] = src.array[:, :, from_ids[1]]
        wanted[:, :, to_ids[2], :9] = src.array[:, :, from_ids[2], :9]
        np.testing.assert_array_equal(dst.array, wanted)


def check_elements_convert_on_the_way(make_pair: MakePair) -> None:
    """bfloat16 into float32, and into int8 with a scale for each tensor."""
    with make_pair(SHAPE) as pair:
        src = View.make(pair.prefill, "bf16", pair.prefill.array, "l2bthd", dtype="bfloat16")
        values = np.random.default_rng(pair.seed).normal(0, 40, pair.prefill.array.shape).astype(np.float32)
        pair.prefill.array[...] = (values.view(np.uint32) >> 16).astype(np.uint16)
        exact = (pair.prefill.array.astype(np.uint32) << 16).view(np.float32)
        from_ids, to_ids = tables(pair, 40)
        bytes_of_dst = pair.decode.array.reshape(-1).view(np.uint8)
        wide = bytes_of_dst.view(np.float32).reshape(_LAYERS, _KV, _BLOCKS // 2, _HEADS, _TOKENS, _DIM)
        narrow = bytes_of_dst[: bytes_of_dst.size // 2].view(np.int8).reshape(SHAPE)
        scale = Quantization.per_tensor(0.5)
        float32 = View.make(pair.decode, "float32", wide, "l2bhtd")
        int8 = View.make(pair.decode, "int8", narrow, "l2bthd", quantization=scale)
        for verb in ("write", "read"):
            wide[...] = 7
            to_half = np.random.default_rng(pair.seed).permutation(_BLOCKS // 2)[:40]
            if post(pair, src, float32, verb, from_ids, to_half, integrity=True):
                wanted = np.full_like(wide, 7)
                wanted[:, :, to_half] = exact[:, :, from_ids].swapaxes(3, 4)
                np.testing.assert_array_equal(wide, wanted)
            narrow[...] = 7
            if post(pair, src, int8, verb, from_ids, to_ids, integrity=True):
                codes = np.full_like(narrow, 7)
                codes[:, :, to_ids] = np.clip(np.rint(exact[:, :, from_ids] / np.float32(0.5)), -128, 127)
                np.testing.assert_array_equal(narrow, codes)


def check_page_scales_go_along_from_larger_pages(make_pair: MakePair) -> None:
    """Pages of 32 tokens, each with a scale, become pages of 16: both halves get their page's scale."""
    with make_pair(SHAPE) as pair:

        def paged(cache: Cache, tokens: int, dtype: str) -> tuple[View, NDArray[np.float32]]:
            shape = (_LAYERS, _KV, _BLOCKS * _TOKENS // tokens, tokens, _HEADS, _DIM)
            pages, scales = np.split(cache.array.reshape(-1).view(np.uint8), 2)
            array = pages.reshape(shape)
            floats = scales[: 4 * math.prod(shape[:3])].view(np.float32).reshape(shape[:3])
            place = {"dtype": dtype, "scales": floats, "scale_axes": "l2b"}
            return View.make(cache, dtype, array, "l2bthd", **place), floats

        for dtype in ("int8", "float8_e4m3fn"):
            src, src_scales = paged(pair.prefill, 2 * _TOKENS, dtype)
            dst, dst_scales = paged(pair.decode, _TOKENS, dtype)
            random = np.random.default_rng(pair.seed)
            src.array[...] = random.integers(0, 256, src.array.shape, np.uint8)
            src_scales[...] = random.uniform(0.1, 4, src_scales.shape)
            from_ids, to_ids = random.permutation(_BLOCKS // 2)[:30], random.permutation(_BLOCKS)[:60]
            for verb in ("write", "read"):
                dst.array[...], dst_scales[...] = 7, 7
                if not post(pair, src, dst, verb, from_ids, to_ids, integrity=True):
                    continue
                wanted, scales = np.full_like(dst.array, 7), np.full_like(dst_scales, 7)
                wanted[:, :, to_ids] = src.array[:, :, from_ids].reshape(_LAYERS, _KV, -1, *SHAPE[3:])
                scales[:, :, to_ids] = src_scales[:, :, from_ids].repeat(2, axis=2)
                np.testing.assert_array_equal(dst.array, wanted)
                np.testing.assert_array_equal(dst_scales, scales)


def check_layouts_that_no_program_bridges_post_nothing(make_pair: MakePair) -> None:
    """Another head size is refused with a message, and so are impossible tables."""
    with make_pair(SHAPE) as pair:
        src = View.make(pair.prefill, "right", pair.prefill.array, "l2bthd")
        other = pair.decode.array.reshape(_LAYERS, _KV, _BLOCKS, _TOKENS, _HEADS * 2, _DIM // 2)
        dst = View.make(pair.decode, "wrong", other, "l2bthd")
        agent = pair.prefill.agent
        remote = dst.seen_by(pair.prefill)
        raises("layout-mismatch", lambda: agent.write(src.region, remote, [1], [2]))
        paged = pair.decode.array.reshape(_LAYERS, _KV, -1, 64, _HEADS, _DIM)
        larger = View.make(pair.decode, "larger", paged, "l2bthd").seen_by(pair.prefill)
        raises("length-mismatch", lambda: agent.write(src.region, larger, range(9), [1]))
        raises("out-of-range", lambda: agent.write(src.region, larger, range(4), [1], tokens=range(65)))
        raises("out-of-range", lambda: agent.write(src.region, larger, range(4), [1], heads=range(3, 5)))
        raises("duplicate-block", lambda: agent.write(src.region, larger, range(8), [1, 1]))


CHECKS: Final = (
    check_heads_and_tokens_change_places,
    check_two_ranks_fill_one,
    check_pages_of_unequal_size,
    check_a_part_of_a_block_completes_what_needs_no_more,
    check_elements_convert_on_the_way,
    check_page_scales_go_along_from_larger_pages,
    check_layouts_that_no_program_bridges_post_nothing,
)
