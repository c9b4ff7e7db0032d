"""Conversions: every number becomes the same as with ml_dtypes and torch, alone and in a program."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.quantization import Per, Quantization
from kvxfer.plan.compile import compile_program
from kvxfer.plan.program import CopyProgram
from kvxfer.plan.units import pair_units
from tests.property import interpreter, rounding
from tests.property.acceptance import require_accepted
from tests.property.oracle import (
    Bytes,
    byte_offsets,
    common_heads,
    common_layers,
    describe_layout,
    extent,
    first_difference,
    moves,
    poison,
)
from tests.property.scaled_oracle import (
    PAGED,
    converted,
    is_scattered,
    moves_bytes,
    obstacle,
    region_nbytes,
    same_nans,
    scale_offsets,
)
from tests.property.strategies import (
    BOOLEANS,
    NUM_EXAMPLES,
    PLAIN,
    Model,
    Rank,
    choice,
    draw_family,
    draw_pages,
    draw_tables,
    draw_world,
    make_layout,
    overlapping,
    parts,
    pick,
    upto,
)
from tests.property.strategies import examples as settings_for
from tests.seeds import seed_of

pytestmark = pytest.mark.timeout(0 if NUM_EXAMPLES > 100_000 else 300)

NAMES = list(rounding.DTYPES)
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
#: From the slowest to the fastest; a machine has those up to the one that it chooses, "".
LADDER = ["scalar", "avx2", "avx512"]
KERNELS = [
    "",
    *LADDER[: LADDER.index(_native.CONVERT_KERNEL) + 1],
    *(
        pytest.param(kernel, marks=pytest.mark.skip(reason="this machine has no such kernel"))
        for kernel in LADDER[LADDER.index(_native.CONVERT_KERNEL) + 1 :]
    ),
]


# ---- numbers ------------------------------------------------------------------------------------


def patterns(dtype: str) -> NDArray[Any]:
    """Returns every number of a dtype; of float32 those near which a narrower dtype rounds."""
    kind = rounding.DTYPES[dtype]
    if kind.itemsize < 4:
        return np.arange(1 << 8 * kind.itemsize).astype(BITS[kind.itemsize]).view(kind)
    near = []
    for name in NAMES[:-1]:
        if name == "float32":
            continue
        numbers = np.unique(rounding.widen(patterns(name)))
        numbers = numbers[np.isfinite(numbers)].astype(np.float64)
        # A tie of two neighbours, and one beyond the largest.
        ties = np.concatenate([(numbers[1:] + numbers[:-1]) / 2, numbers[-1:] * 1.5 - numbers[-2:-1] / 2])
        near += [numbers, ties, -ties[-1:]]
    near.append(np.arange(-140, 140) / 2)  # ties of int8
    exact = np.concatenate(near).astype(np.float32)
    any_bits = (
        np.random.default_rng(seed_of("any bits")).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    )
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3.4028235e38], np.float32)
    with np.errstate(all="ignore"):
        around = [np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
    return np.concatenate([exact, *around, any_bits, special])


def convert(
    src: str,
    dst: str,
    numbers: NDArray[Any],
    scales: tuple[float | None, float | None] = (None, None),
    saturate: bool = False,
    kernel: str = "",
) -> NDArray[Any]:
    stored = np.frombuffer(np.ascontiguousarray(numbers).tobytes(), np.uint8)
    out = _native.convert(src, dst, stored, len(numbers), *scales, saturate, kernel)
    assert len(out) == len(numbers) * rounding.DTYPES[dst].itemsize
    return np.frombuffer(out, rounding.DTYPES[dst])


def reference(
    src: NDArray[Any],
    dst: str,
    scales: tuple[float | None, float | None] = (None, None),
    saturate: bool = False,
) -> NDArray[Any]:
    x = rounding.widen(src)
    with np.errstate(all="ignore"):
        if scales[0] is not None:
            x = x * np.float32(scales[0])
        if scales[1] is not None:
            x = x / np.float32(scales[1])
    return rounding.narrow(x, dst, saturate)


def require_same(
    what: str, numbers: NDArray[Any], got: NDArray[Any], wanted: NDArray[Any], any_nan: bool = False
) -> None:
    """Checks that every number has the same bits; with `any_nan` a NaN may have other bits."""
    bits = BITS[got.dtype.itemsize]
    differ = got.view(bits) != wanted.view(bits)
    if any_nan and got.dtype != np.int8:
        differ &= ~(np.isnan(got.astype(np.float32)) & np.isnan(wanted.astype(np.float32)))
    wrong = np.flatnonzero(differ)
    if len(wrong):
        at = int(wrong[0])
        was, is_now, should = (f"{x[at]!r} ({x[at].tobytes()[::-1].hex()})" for x in (numbers, got, wanted))
        pytest.fail(
            f"{what}: {len(wrong)} of {len(got)} numbers are wrong, the first is number {at}: "
            f"{was} became {is_now} instead of {should}"
        )


def payload(src: str, dst: str) -> bool:
    """Returns whether a NaN may have other bits than the reference's.

    numpy, not ml_dtypes, rounds to float16 and keeps some of the payload; a conversion to the same dtype may
    keep all of it.
    """
    return src == dst or dst in ("float16", "float32")


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "scalar"])
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(NAMES, NAMES)))
def test_all_kernels_give_the_same_bits(src: str, dst: str, kernel: str) -> None:
    numbers = patterns(src)
    for scales in ((None, None), (0.37, 1.9)):
        wanted = convert(src, dst, numbers, scales, kernel="scalar")
        got = convert(src, dst, numbers, scales, kernel=kernel)
        require_same(f"{src} to {dst} by {kernel or 'the best kernel'}", numbers, got, wanted)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(NAMES, NAMES)))
def test_every_number_becomes_what_ml_dtypes_makes_of_it(src: str, dst: str, kernel: str) -> None:
    numbers = patterns(src)
    for saturate in (False, True):
        got = convert(src, dst, numbers, saturate=saturate, kernel=kernel)
        wanted = reference(numbers, dst, saturate=saturate)
        require_same(f"{src} to {dst}, saturate {saturate}", numbers, got, wanted, payload(src, dst))


@pytest.mark.parametrize("dst", NAMES)
@pytest.mark.parametrize("src", NAMES)
def test_every_number_becomes_what_torch_makes_of_it(src: str, dst: str) -> None:
    torch = pytest.importorskip("torch")
    if dst == "int8":
        pytest.skip("torch's int8 is by truncation and undefined beyond -128 to 127")
    numbers = patterns(src)
    integers = {1: np.uint8, 2: np.int16, 4: np.int32}
    raw = torch.from_numpy(numbers.view(integers[numbers.dtype.itemsize]).copy())
    tensor = raw.view(getattr(torch, src)).float().to(getattr(torch, dst))
    raw = tensor.view(getattr(torch, np.dtype(integers[tensor.element_size()]).name))
    wanted = raw.numpy().view(rounding.DTYPES[dst])
    # Newer torch saturates e4m3fn, which has no infinity; older torch and ml_dtypes make it NaN.
    large = torch.tensor([1e9]).to(getattr(torch, dst)).float()
    saturate = bool(torch.isfinite(large)) and dst == "float8_e4m3fn"
    require_same(f"{src} to {dst}", numbers, convert(src, dst, numbers, saturate=saturate), wanted, True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(NAMES, NAMES)))
def test_scales_multiply_at_the_source_and_divide_at_the_destination(src: str, dst: str, kernel: str) -> None:
    numbers = patterns(src)
    if len(numbers) > 70_000:
        numbers = numbers[:: len(numbers) // 70_000]
    for scales in ((0.37, None), (None, 0.013), (3.1, 0.7), (1e-3, 1e30), (1.0, 3e38), (2.0**-126, 1.0)):
        for saturate in (False, True):
            got = convert(src, dst, numbers, scales, saturate, kernel)
            wanted = reference(numbers, dst, scales, saturate)
            what = f"{src} to {dst}, scales {scales}, saturate {saturate}"
            require_same(what, numbers, got, wanted, payload(src, dst))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(NAMES, NAMES)))
def test_any_count_converts_alike(src: str, dst: str, kernel: str, seed: int) -> None:
    # The ends of a run are where a vector does not fit.
    numbers = np.random.default_rng(seed).permutation(patterns(src))[:100]
    wanted = reference(numbers, dst, (0.5, 3.0))
    for count in range(70):
        got = convert(src, dst, numbers[:count], (0.5, 3.0), kernel=kernel)
        require_same(f"{count} of {src} to {dst}", numbers, got, wanted[:count], payload(src, dst))


# ---- programs -----------------------------------------------------------------------------------

_ITEMSIZE = {name: dtype.itemsize for name, dtype in rounding.DTYPES.items()}
_NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
_STATIC = ("tensor", "layer", "head")


@dataclass(frozen=True)
class Crossing:
    """A transfer between two dtypes or quantizations."""

    src: KVLayout
    dst: KVLayout
    src_table: list[int]
    dst_table: list[int]
    tokens: range | None
    heads: range | None
    seed: int

    def __repr__(self) -> str:
        return (
            f"\n  {describe_layout('src', self.src)}\n  {describe_layout('dst', self.dst)}\n"
            f"  src table {self.src_table}, dst table {self.dst_table}, "
            f"tokens {self.tokens}, heads {self.heads}, seed {self.seed}"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def scaled(layout: KVLayout, per: Per | Literal[""], seed: int, saturate: bool) -> KVLayout:
    """Gives a layout scales. Static scales are those of the model, and a rank has its slice of them."""
    if not per:
        return layout
    if per in PAGED:
        # Behind the elements; blocks outermost for an odd seed, innermost but heads for an even one.
        heads = layout.num_heads if per == "page_head" else 1
        axes = [("layer", layout.num_layers), ("kv", layout.num_kv), ("block", layout.num_blocks)]
        axes = [axes[2], *axes[:2]] if seed % 2 else axes
        strides, size = {"head": 4 if heads > 1 else 0}, 4 * heads
        for name, count in reversed(axes):
            strides[name] = size if count > 1 else 0
            size *= count
        places = {f"{name}_stride": stride for name, stride in strides.items()}
        offset = -(-extent(layout) // 4) * 4 + 4 * (seed % 3)
        return replace(layout, quantization=Quantization(per, (), offset, saturate=saturate, **places))
    model = np.random.default_rng(seed).uniform(
        0.02, 4, (layout.total_layers, layout.num_kv, layout.total_heads)
    )
    layers = slice(layout.first_layer, layout.first_layer + layout.num_layers)
    heads_held = slice(layout.first_head, layout.first_head + layout.num_heads)
    chosen = {
        "tensor": model[:1, :1, :1],
        "layer": model[layers, :, :1],
        "head": model[layers, :, heads_held],
    }
    numbers = chosen[per].astype(np.float32)
    return replace(layout, quantization=Quantization(per, tuple(numbers.ravel().tolist()), saturate=saturate))


@st.composite
def crossings(draw: st.DrawFn) -> Crossing:
    """Draws what `transfers` draws, between dtypes and quantizations."""
    sides = []
    src_dtype, dst_dtype = draw(choice(*NAMES)), draw(choice(*NAMES))
    if draw(upto(3)) == 3:
        dst_dtype = src_dtype
    src_per = draw(choice("", *_STATIC, *PAGED))
    # A scale that is found on the way is of a dtype that needs one.
    dst_per = draw(choice("", *_STATIC, *PAGED) if dst_dtype in _NARROW else choice("", *_STATIC))
    latent = draw(upto(3)) == 3
    model = Model(
        1 + draw(upto(2)),
        1 if latent else 2,
        1 if latent else draw(choice(1, 2, 4)),
        1 + draw(upto(8)),
        src_dtype,
        _ITEMSIZE[src_dtype],
    )
    theirs = replace(model, dtype=dst_dtype, itemsize=_ITEMSIZE[dst_dtype])
    dst_rank = pick(draw, draw_world(draw, model))
    src_rank = pick(draw, overlapping(draw_world(draw, model), dst_rank))
    src_tokens, dst_tokens = draw_pages(draw, model)
    if dst_per in PAGED and src_tokens % dst_tokens and draw(upto(7)):
        src_tokens = dst_tokens * (1 + draw(upto(2)))
    if dst_per in PAGED and draw(upto(7)):
        dst_rank = replace(dst_rank, cp_rank=0, cp_size=1, cp_interleave=1)
        src_rank = replace(src_rank, cp_rank=0, cp_size=1, cp_interleave=1)
    src_null, dst_null = draw(choice(-1, 0, 2)), draw(choice(-1, 0, 1))
    sketches = [
        make_layout(model, rank, PLAIN, num_blocks=3, block_tokens=tokens, null_block=null)
        for rank, tokens, null in ((src_rank, src_tokens, src_null), (dst_rank, dst_tokens, dst_null))
    ]
    both = draw_tables(draw, *sketches, max_tokens=12)
    for mine, rank, num_blocks, sketch in (
        (model, src_rank, both.src_num_blocks, sketches[0]),
        (theirs, dst_rank, both.dst_num_blocks, sketches[1]),
    ):
        sides.append(
            make_layout(
                mine,
                rank,
                draw_family(draw),
                num_blocks=num_blocks,
                block_tokens=sketch.block_tokens,
                null_block=sketch.null_block,
            )
        )
    saturate, seed = draw(BOOLEANS), draw(upto(1000))
    src = scaled(sides[0], src_per, seed, saturate)
    dst = scaled(sides[1], dst_per, seed + draw(upto(1)), saturate)
    heads = None
    shared = common_heads(src, dst)
    if len(shared) > 1 and draw(upto(7)) == 7:
        heads = range(shared[0], shared[-1])
    return Crossing(src, dst, both.src, both.dst, both.tokens, heads, seed)


def numbers_in(layout: KVLayout, seed: int) -> Bytes:
    """Returns memory that holds a number wherever one is read, some of them special, and scales."""
    rng = np.random.default_rng(seed)
    memory = poison(region_nbytes(layout), 1)
    blocks = [b for b in range(layout.num_blocks) for _ in range(layout.block_tokens)]
    slots = list(range(layout.block_tokens)) * layout.num_blocks
    where = byte_offsets(layout, blocks, slots)
    shape = where.shape[:-1]
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-40, 448.0, -65504.0, 127.5], np.float32)
    x = np.where(rng.random(shape) < 0.03, rng.choice(special, shape), x).astype(np.float32)
    if rng.random() < 0.1:
        x[:, :, : layout.block_tokens] = 0  # a page whose largest number is 0
    memory[where] = rounding.narrow(x, layout.dtype)[..., None].view(np.uint8)
    if layout.quantization is not None and layout.quantization.per in PAGED:
        places = scale_offsets(layout, range(layout.num_blocks))
        scales = rng.uniform(0.02, 4, places.shape).astype("<f4")
        memory[places[..., None] + np.arange(4)] = scales[..., None].view(np.uint8)
    return memory


def run(how: str, program: CopyProgram, layer: int, pairs: interpreter.Pairs, src: Bytes, dst: Bytes) -> None:
    which = (
        program.loops,
        program.conversions,
        program.scales,
        interpreter.units(program),
        layer,
        pairs.src_ids,
        pairs.dst_ids,
        pairs.num_fine,
    )
    if how == "the formula":
        interpreter.execute(program, layer, pairs, src, dst)
    elif how == "execute":
        _native.execute(*which, src, dst)
    else:
        _native.unpack(*which, _native.pack(*which, src), dst)


@pytest.mark.parametrize("count", parts(0.15), ids=str)
def test_a_program_converts_every_element_as_the_oracle_does(count: int) -> None:
    @settings_for(count)
    @given(crossings(), BOOLEANS)
    def check(crossing: Crossing, fine: bool) -> None:
        src, dst, heads = crossing.src, crossing.dst, crossing.heads
        found = pair_units(
            src,
            dst,
            np.array(crossing.src_table, np.uint32),
            np.array(crossing.dst_table, np.uint32),
            crossing.tokens,
        )
        pairs = interpreter.Pairs(found.src_ids, found.dst_ids, found.num_fine)
        fine = fine or pairs.num_fine > 0
        reason = obstacle(src, dst, heads, fine)
        if reason is not None:
            refused = ""
            try:
                compile_program(src, dst, heads=heads, fine=fine)
            except UsageError as error:
                refused = str(error)
            assert refused, f"{reason}, yet there is a program{crossing!r}"
            return
        try:
            program = compile_program(src, dst, heads=heads, fine=fine)
        except UsageError as error:
            if is_scattered(src, dst) and "keep head_dim contiguous" in str(error):
                return
            raise
        assert len(program.conversions) <= len(program.loops)
        require_accepted(program, src, dst)
        moved = moves(src, dst, crossing.src_table, crossing.dst_table, crossing.tokens)
        src_memory = numbers_in(src, crossing.seed)
        before = poison(region_nbytes(dst), 2)
        wanted = converted(src, dst, moved, src_memory, before, heads=heads)
        as_they_are = moves_bytes(src, dst, common_layers(src, dst), common_heads(src, dst, heads))
        unchanged = src_memory.copy()
        for how in ("the formula", "execute", "pack and unpack"):
            memory = before.copy()
            for layer in range(dst.num_layers):
                run(how, program, layer, pairs, src_memory, memory)
            assert np.array_equal(src_memory, unchanged), f"{how} wrote into the source"
            after = wanted
            if not as_they_are:
                memory, after = (same_nans(dst, moved, x, heads=heads) for x in (memory, wanted))
            if wrong := first_difference(how, dst, crossing.dst_table, memory, after):
                pytest.fail(f"{wrong}{crossing!r}")

    check()


def test_what_is_no_number_is_refused_to_become_one() -> None:
    ends = [
        make_layout(Model(1, 1, 1, 4, dtype, 1), Rank(0, 1, 0, 1), PLAIN, num_blocks=1, block_tokens=2)
        for dtype in ("uint8", "int8", "opaque")
    ]
    for src, dst in itertools.permutations(ends, 2):
        with pytest.raises(UsageError, match="dtype") as caught:
            compile_program(src, dst)
        assert caught.value.code == "layout-mismatch"
