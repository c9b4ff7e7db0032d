"""pair_units: tables and ranges that it refuses, and the words.

Which unit goes to which is compared with an oracle in tests/property/test_units.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.plan.units import pair_units


def pages(block_tokens: int, *, num_blocks: int = 100, **fields: Any) -> KVLayout:
    """A latent cache of 1-byte elements: nothing but its pages matters here."""
    values: dict[str, Any] = {
        "dtype": "opaque",
        "itemsize": 1,
        "num_blocks": num_blocks,
        "block_tokens": block_tokens,
        "num_kv": 1,
        "head_dim": 1,
        "first_layer": 0,
        "num_layers": 1,
        "total_layers": 1,
        "first_head": 0,
        "num_heads": 1,
        "total_heads": 1,
        "block_stride": block_tokens,
        "token_stride": 1 if block_tokens > 1 else 0,
        "head_stride": 0,
        "dim_stride": 0,
    }
    return KVLayout(**(values | fields))


def table(*ids: int) -> NDArray[np.uint32]:
    return np.array(ids, np.uint32)


TENTHS = pages(16, num_blocks=10)
# One block of 4 of rank 0 of 2, in turns of 2: tokens 0, 1, 4, 5; token 8 has no place.
HALF = pages(4, cp_rank=0, cp_size=2, cp_interleave=2)


@pytest.mark.parametrize(
    ("src", "dst", "src_blocks", "dst_blocks", "tokens", "code", "words"),
    [
        (
            *(pages(64), pages(16), [0, 1], [0, 1, 2, 3], None, "length-mismatch"),
            "2 blocks of 64.* 128 .*4 blocks of 16.* 64 ",
        ),
        (pages(16), pages(64), [], [0], None, "length-mismatch", "0 blocks of 16.*1 block of 64.* 64 "),
        (
            *(pages(4), pages(4), [1, 2, 3], [9, 8], range(2, 9), "out-of-range"),
            "tokens 2 to 8 .* 2 blocks of 4 tokens at the destination.*token 8",
        ),
        (HALF, pages(8), [1], [1, 2], range(9), "out-of-range", "1 block of 4 .*source ends before token 8"),
        (
            *(pages(16, null_block=0), pages(16, null_block=0), [0, 5], [8, 9], None, "out-of-range"),
            "null block 0 of the source .* block 8 of the destination",
        ),
        (TENTHS, pages(16), [1, 10], [1, 2], None, "out-of-range", "block 10 .* 10 blocks at the source"),
        (TENTHS, pages(32), [1, 10], [1], None, "out-of-range", "block 10 .* 10 blocks at the source"),
    ],
    ids=[
        *("a page too many", "a page too few", "beyond the table", "beyond a rank's part"),
        *("a null source", "no block", "no block of unlike pages"),
    ],
)
def test_tables_and_tokens_that_do_not_fit_are_refused(
    src: KVLayout,
    dst: KVLayout,
    src_blocks: list[int],
    dst_blocks: list[int],
    tokens: range | None,
    code: str,
    words: str,
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        pair_units(src, dst, table(*src_blocks), table(*dst_blocks), tokens)
    assert caught.value.code == code


@pytest.mark.parametrize("tokens", [range(0, 8, 2), range(8, 0, -1), range(-4, 4), range(-1), [0, 1], 4])
def test_what_are_no_tokens_of_a_sequence_is_refused(tokens: Any) -> None:
    with pytest.raises(UsageError, match=r"^tokens ") as caught:
        pair_units(pages(4), pages(4), table(1, 2), table(9, 8), tokens)
    assert caught.value.code == "invalid-argument"


def test_unit_ids_that_need_more_than_32_bits_are_refused() -> None:
    src, dst = pages(1 << 12, num_blocks=1 << 20), pages((1 << 12) + 1, num_blocks=8)
    with pytest.raises(
        UsageError, match=r"too small a common unit.* 4096 .* 1048576 .* 4294967296"
    ) as caught:
        pair_units(src, dst, table(0), table(0), None)
    assert caught.value.code == "layout-mismatch"
    equal = pages(1 << 12, num_blocks=1 << 20)
    assert pair_units(equal, equal, table(5), table(6), None).src_ids.tolist() == [5]
    with pytest.raises(UsageError, match="too small a common unit"):  # single tokens do not fit
        pair_units(equal, equal, table(5), table(6), range(3))
