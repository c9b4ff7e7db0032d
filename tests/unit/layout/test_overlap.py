"""overlap: strided sets overlap exactly if marking every byte finds a common one."""

from __future__ import annotations

import itertools

import numpy as np

from kvxfer.layout.overlap import Strided, overlapping_starts, share_a_byte

Axes = list[tuple[int, int]]


def nested(rng: np.random.Generator) -> tuple[int, Axes]:
    """A run and axes whose strides nest, with gaps or without."""
    nbytes = int(rng.integers(1, 4))
    inside, axes = nbytes, []
    for _ in range(rng.integers(0, 4)):
        count, stride = int(rng.integers(1, 4)), inside + int(rng.choice([0, 0, 1, 5, 9]))
        axes.append((count, stride))
        inside += (count - 1) * stride
    rng.shuffle(axes)
    return nbytes, axes


def marked(start: int, nbytes: int, axes: Axes) -> set[int]:
    return {
        start + sum(i * stride for i, (_, stride) in zip(index, axes, strict=True)) + byte
        for index in itertools.product(*(range(count) for count, _ in axes))
        for byte in range(nbytes)
    }


def test_axes_without_gaps_become_a_run() -> None:
    assert Strided.of(3, 2, [(4, 8), (2, 2), (2, 4)]) == Strided(3, 32, ())
    assert Strided.of(0, 2, [(4, 16), (3, 64)]) == Strided(0, 2, ((12, 16),))


def test_sharing_a_byte_is_what_marking_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shared = 0
    for _ in range(4000):
        (nbytes, axes), (other_nbytes, other_axes) = nested(rng), nested(rng)
        if rng.random() < 0.5:  # strides in common, as scales and elements of a page have them
            other_axes = [(count, stride) for count, stride in axes if rng.random() < 0.8]
            other_nbytes = nbytes
        starts = rng.integers(0, 40, rng.integers(1, 4))
        at = int(rng.integers(0, 60))
        ours = set().union(*(marked(int(start), nbytes, axes) for start in starts))
        expected = bool(ours & marked(at, other_nbytes, other_axes))
        found = share_a_byte(
            starts.astype(np.int64), Strided.of(0, nbytes, axes), Strided.of(at, other_nbytes, other_axes)
        )
        assert found == expected
        shared += expected
    assert 500 < shared < 3500


def test_no_overlap_of_starts_is_missed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    apart = refused = 0
    for _ in range(4000):
        nbytes, axes = nested(rng)
        starts = [int(start) for start in rng.integers(0, 80, rng.integers(2, 5))]
        sets = [marked(start, nbytes, axes) for start in starts]
        overlap = any(one & other for one, other in itertools.combinations(sets, 2))
        found = overlapping_starts(starts, Strided.of(0, nbytes, axes))
        if overlap:
            assert found is not None
        else:
            apart += 1
            refused += found is not None
    # Starts that interleave with every axis may be refused; they are random here, never in a cache.
    assert apart > 200
    assert refused < apart / 4


def test_strides_made_to_waste_time_end_soon() -> None:
    count = (1 << 32) - 1
    one = Strided.of(0, 1, [(count, 3), (1000, 3 * count + 1)])
    other = Strided.of(1, 1, [(count, 7)])
    assert share_a_byte(np.zeros(1, np.int64), one, other)


def test_many_blocks_cost_nothing() -> None:
    blocks = 1 << 30
    page = Strided.of(0, 4096, [(blocks, 4352), (80, blocks * 4352)])
    scales = Strided.of(4096, 4, [(64, 4), (blocks, 4352), (80, blocks * 4352)])
    assert not share_a_byte(np.zeros(1, np.int64), page, scales)
    assert share_a_byte(np.zeros(1, np.int64), page, Strided.of(4095, 4, [(blocks, 4352)]))
