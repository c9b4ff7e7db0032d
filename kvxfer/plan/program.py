"""The copy program: strided loops over pairs of units, and facts derived from them.

`kvxfer.plan` makes a program from two layouts; native/include/kvxfer/copy_program.h executes it.

How a program is numbered
-------------------------
Public calls number layers and heads model-wide, because the two ends may hold different slices, and only the
model's numbers have the same meaning at both. The native core numbers the layers of a program, of a transfer
and of an expectation as the **destination region** does: layer 0 is ``dst.first_layer``, and head 0 is
``dst.first_head``. So if two sources each send half of the layers or heads into one region, both count
towards the same expectation without a translation.

Block tables become *unit ids* (kvxfer/plan/units.py) before a program sees them: a unit is the longest
stretch of tokens that lies within one block at either end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import UsageError
from kvxfer.layout.quantization import SCALE_NBYTES
from kvxfer.plan.consecutive import consecutive

# native/include/kvxfer/copy_program.h: CopyLoop, 128 bytes.
LOOP_DTYPE: Final = np.dtype(
    [
        ("first_layer", "<u4"),
        ("num_layers", "<u4"),
        ("src_offset", "<u8"),
        ("dst_offset", "<u8"),
        ("src_layer_stride", "<u8"),
        ("dst_layer_stride", "<u8"),
        ("src_block_stride", "<u8"),
        ("dst_block_stride", "<u8"),
        ("src_unit_stride", "<u8"),
        ("dst_unit_stride", "<u8"),
        ("counts", "<u4", (2,)),
        ("src_strides", "<u8", (2,)),
        ("dst_strides", "<u8", (2,)),
        ("nbytes", "<u8"),
        ("grain", "<u4"),
        ("conversion", "<u4"),
    ]
)

# native/include/kvxfer/copy_program.h: Conversion, 88 bytes.
CONVERSION_DTYPE: Final = np.dtype(
    [
        ("src_dtype", "u1"),
        ("dst_dtype", "u1"),
        ("src_scales", "u1"),
        ("dst_scales", "u1"),
        ("saturate", "u1"),
        ("reserved", "u1", (3,)),
        ("src_offset", "<u8"),
        ("src_layer_stride", "<u8"),
        ("src_block_stride", "<u8"),
        ("src_strides", "<u8", (2,)),
        ("dst_offset", "<u8"),
        ("dst_layer_stride", "<u8"),
        ("dst_block_stride", "<u8"),
        ("dst_strides", "<u8", (2,)),
    ]
)

# Bounds that agents hold programs to: native/core/control/wire.h (loops, units, heads, scales of a table) and
# native/core/copy/footprint.cpp (runs of a pair over all layers, bytes of a pair in a loop, bytes of a block
# whose scales are computed).
MAX_LOOPS: Final = 8192
MAX_UNITS: Final = 1 << 20
MAX_HEADS: Final = 1 << 16
MAX_SCALES: Final = 1 << 16
MAX_RUNS: Final = 1 << 20
MAX_PAIR_NBYTES: Final = 1 << 30
MAX_FOUND_NBYTES: Final = 16 << 20

# native/core/copy/pack.h: kGatherBelowNbytes. If the contiguous pieces at one end are shorter than this on
# average, a stream gathers or scatters them there.
GATHER_BELOW_NBYTES: Final = 512

COARSE: Final = 0  # CopyLoop.grain: pairs of units
FINE: Final = 1  # pairs of single tokens

# CopyProgram.conversions name dtypes by number: native/include/kvxfer/number.h.
_ITEMSIZE: Final = np.array([0, 2, 2, 4, 1, 1, 1], np.int64)
_IN_REGION: Final = 2  # Conversion.*_scales: float32 in the region's memory


@dataclass(frozen=True, slots=True, eq=False)
class CopyProgram:
    """Maps the bytes of a pair of units from source to destination, for every layer and head that moves.

    Attributes
    ----------
    loops
        LOOP_DTYPE [num_loops], read-only, ascending in ``first_layer``; layers are numbered as in the
        destination region.
    conversions
        CONVERSION_DTYPE [num_conversions], read-only; loop k uses ``conversions[k.conversion - 1]``, or none
        if ``k.conversion`` is 0.
    scales
        float32 [num_scales], read-only: the static scales that conversions refer to.
    src_units, dst_units
        Units of one block at either end.
    src_tokens, dst_tokens
        Tokens of one block at either end if the program has loops for single tokens; else 0, 0.
    dst_heads
        ``(first, num, total)``: the destination rank's heads that it fills; head 0 is that rank's first.
    num_program_layers
        Number of layers of the destination region; layers outside `layers` have no loop.
    origin
        Model-wide number of program layer 0: the destination's first layer.
    layers, heads
        Layers and heads that move, numbered model-wide.
    unit_tokens
        Tokens of one unit.
    rows_per_pair
        Rows of ``head_dim`` elements that a pair of units moves in one layer: tokens × heads × kv.
    conversion_words
        A description of what happens to the elements.
    """

    loops: NDArray[np.void]
    conversions: NDArray[np.void]
    scales: NDArray[np.float32]
    src_units: int
    dst_units: int
    src_tokens: int
    dst_tokens: int
    dst_heads: tuple[int, int, int]
    num_program_layers: int
    origin: int
    layers: range
    heads: range
    unit_tokens: int
    rows_per_pair: int
    conversion_words: str

    @property
    def units(self) -> tuple[int, int, int, int]:
        """``(src_units, dst_units, src_tokens, dst_tokens)``, as native calls take them."""
        return self.src_units, self.dst_units, self.src_tokens, self.dst_tokens

    @property
    def pair_nbytes(self) -> int:
        """Bytes that one pair of units writes at the destination in one layer, page scales included.

        The same for every layer of the program.
        """
        return self._layer_sum(self.run_nbytes("dst") * self._runs() + SCALE_NBYTES * self.found_scales())

    @property
    def runs_per_pair(self) -> int:
        """Contiguous runs of one pair in one layer, before runs of adjacent units merge."""
        return self._layer_sum(self._runs())

    @property
    def smallest_run_nbytes(self) -> int:
        """Bytes at the source of the shortest run of a pair of units; page scales count as runs."""
        return int(self.loops["nbytes"][self.loops["grain"] == COARSE].min())

    @property
    def gathers_src(self) -> bool:
        """Whether runs are gathered for rails that charge per run: they are short on average, or converted.

        native/core/copy/pack.cpp decides in the same way.
        """
        return bool(len(self.conversions)) or self._mean_stretch("src") < GATHER_BELOW_NBYTES

    @property
    def scatters_dst(self) -> bool:
        """Whether such rails scatter at the destination, because its runs are short on average."""
        return self._mean_stretch("dst") < GATHER_BELOW_NBYTES

    def explain(self) -> str:
        """Returns a few sentences with figures: what moves, in how many runs, and how."""
        first, last = self.layers[0], self.layers[-1]
        runs = self.runs_per_pair
        _, num_heads, total_heads = self.dst_heads
        if np.all(self.loops["num_layers"] == len(self.layers)):
            shared = "All layers share their loops"
        else:
            shared = "Layers lie irregularly and need separate loops"
        neighbours = "merge into longer runs" if self._blocks_touch() else "stay apart"
        sentences = (
            f"{_count(len(self.loops), 'loop')} for layers {first} to {last} ({len(self.layers)} of the "
            f"{self.num_program_layers} at the destination) and heads {self.heads[0]} to "
            f"{self.heads[-1]} ({num_heads} of the {total_heads} there)",
            shared,
            f"A unit is {_count(self.unit_tokens, 'token')}: {self.src_units} in a block of the source, "
            f"{self.dst_units} in a block of the destination",
            "Tokens that do not fill a unit move one by one" if self.src_tokens else "",
            f"A pair of units moves {self.pair_nbytes} bytes a layer in {_count(runs, 'run')}, the "
            f"smallest of {self.smallest_run_nbytes} bytes: {_count(self.rows_per_pair, 'row')} of "
            f"one head merged {self.rows_per_pair / runs:.4g} to a run; adjacent blocks {neighbours}",
            self.conversion_words,
            self._rail_words(),
        )
        return " ".join(f"{sentence}." for sentence in sentences if sentence)

    def window(self, layers: range | None) -> tuple[int, int]:
        """Returns ``(first, count)`` in the program's numbers for model-wide `layers`.

        Parameters
        ----------
        layers
            Layer numbers in steps of 1; None for all common layers.

        Raises
        ------
        UsageError
            ``invalid-argument`` for another kind of object or other steps, ``out-of-range`` if an end does
            not hold one of them.
        """
        wanted = self.layers if layers is None else consecutive(layers, "layers")
        if wanted[0] < self.layers[0] or wanted[-1] > self.layers[-1]:
            raise UsageError(
                f"layers {wanted[0]} to {wanted[-1]} were named, but both ends hold only {self.layers[0]} "
                f"to {self.layers[-1]} (numbered model-wide)",
                code="out-of-range",
            )
        return wanted[0] - self.origin, len(wanted)

    def _rail_words(self) -> str:
        ends = []
        if self.gathers_src:
            why = (
                "converted on the way" if len(self.conversions) else f"{self._mean_stretch('src')} bytes each"
            )
            ends.append(f"gathered at the source ({why})")
        if self.scatters_dst:
            ends.append(f"scattered at the destination ({self._mean_stretch('dst')} bytes each)")
        if not ends:
            return f"Direct: contiguous pieces have {GATHER_BELOW_NBYTES} bytes or more at both ends"
        return (
            f"Direct where the destination maps the source's memory; on streams runs are {' and '.join(ends)}"
        )

    def _mean_stretch(self, side: str) -> int:
        """Returns the mean bytes of contiguous pieces at one end, over pairs of units."""
        loops = self.loops[self.loops["grain"] == COARSE]
        run = self.run_nbytes(side)[self.loops["grain"] == COARSE]
        outer, inner = loops["counts"].astype(np.int64).T
        outer_step, inner_step = loops[f"{side}_strides"].astype(np.int64).T
        touches = (inner_step == run) | (inner == 1)
        row = np.where(touches, run * inner, run)
        stretch = np.where(touches & ((outer_step == row) | (outer == 1)), row * outer, row)
        nbytes = run * outer * inner * loops["num_layers"]
        return int(nbytes.sum() / (nbytes / stretch).sum())

    def _blocks_touch(self) -> bool:
        """Whether blocks that are adjacent at both ends become one run."""
        loops = self.loops[self.loops["grain"] == COARSE]
        touch = np.all(loops["counts"] == 1) and np.all(loops["conversion"] == 0)
        for side, units in (("src", self.src_units), ("dst", self.dst_units)):
            touch &= np.all(loops["nbytes"] * units == loops[f"{side}_block_stride"])
            touch &= units == 1 or np.all(loops["nbytes"] == loops[f"{side}_unit_stride"])
        return bool(touch)

    def _runs(self) -> NDArray[np.int64]:
        counts = self.loops["counts"].astype(np.int64)
        return np.asarray(counts[:, 0] * counts[:, 1])

    def run_nbytes(self, side: str) -> NDArray[np.int64]:
        """Returns the bytes of a run of each loop at one end, ``"src"`` or ``"dst"``."""
        nbytes = self.loops["nbytes"].astype(np.int64)
        if side == "src" or not len(self.conversions):
            return nbytes
        # Conversion 0 keeps the size, so a row of ones goes in front of the table.
        src = np.concatenate(([1], _ITEMSIZE[self.conversions["src_dtype"]]))
        dst = np.concatenate(([1], _ITEMSIZE[self.conversions["dst_dtype"]]))
        which = self.loops["conversion"]
        return np.asarray(nbytes // src[which] * dst[which])

    def found_scales(self) -> NDArray[np.int64]:
        """Returns how many scales a pair of each loop writes at the destination: one for each granule."""
        if not len(self.conversions):
            return np.zeros(len(self.loops), np.int64)
        found = self.conversions["dst_scales"] == _IN_REGION
        stepped = self.conversions["dst_strides"] != 0
        which = self.loops["conversion"].astype(np.int64) - 1
        granules = np.where(stepped[which], self.loops["counts"], 1).astype(np.int64).prod(axis=1)
        return np.where((which >= 0) & found[which], granules, 0)

    def _layer_sum(self, values: NDArray[np.int64]) -> int:
        """Adds up the values of the loops over units for the first layer."""
        first = self.loops["first_layer"].astype(np.int64)
        layer = self.layers[0] - self.origin
        held = (first <= layer) & (layer < first + self.loops["num_layers"])
        return int(values[held & (self.loops["grain"] == COARSE)].sum())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
