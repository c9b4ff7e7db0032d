"""Copies on a GPU give the same bytes as the processor's executor does with the same memory.

(tests/property compares the executor with its own oracle.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvxfer
from kvxfer import _native
from kvxfer.gpu import calibration
from kvxfer.gpu.copy_stream import CopyStream
from kvxfer.layout.quantization import Quantization
from kvxfer.plan.compile import compile_program
from kvxfer.plan.program import CopyProgram
from kvxfer.plan.units import pair_units
from tests.property.oracle import common_layers, extent, poison
from tests.property.strategies import Example, transfers

pytestmark = pytest.mark.gpu

Bytes = NDArray[np.uint8]
Ids = NDArray[np.uint32]
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


@pytest.fixture(scope="module")
def stream() -> Iterator[CopyStream]:
    with CopyStream(num_ctas=16) as made:
        yield made


def on_device(memory: Bytes, first_byte: int) -> Any:
    """Returns the bytes on the device, at an address with exactly this alignment."""
    import torch

    whole = torch.empty(len(memory) + 16, dtype=torch.uint8, device="cuda")
    part = whole[first_byte : first_byte + len(memory)]
    part.copy_(torch.from_numpy(memory))
    torch.cuda.synchronize()
    return part


def on_processor(
    program: CopyProgram, layers: range, src_ids: Ids, dst_ids: Ids, num_fine: int, src: Bytes, dst: Bytes
) -> Bytes:
    units = (program.src_units, program.dst_units, program.src_tokens, program.dst_tokens)
    after = dst.copy()
    for layer in layers:
        _native.execute(
            program.loops,
            program.conversions,
            program.scales,
            units,
            layer,
            src_ids,
            dst_ids,
            num_fine,
            src,
            after,
        )
    return after


def require_same(found: Any, wanted: Bytes, what: str) -> None:
    wrong = np.flatnonzero(found.cpu().numpy() != wanted)
    assert not len(wrong), f"{what}: {len(wrong)} bytes are wrong, the first at {wrong[0]}"


def test_layouts_of_every_kind_are_copied_as_the_processor_does(stream: CopyStream) -> None:
    @settings(max_examples=300, deadline=None, database=None, print_blob=True)
    @given(transfers(), st.integers(0, 15), st.integers(0, 15), st.booleans(), st.booleans())
    def check(example: Example, src_at: int, dst_at: int, aligned: bool, fine: bool) -> None:
        src, dst = example.src, example.dst
        layers = common_layers(src, dst)
        src_table, dst_table = np.array(example.src_table, np.uint32), np.array(example.dst_table, np.uint32)
        pairs = pair_units(src, dst, src_table, dst_table, example.tokens)
        program = compile_program(src, dst, heads=example.heads, fine=fine or pairs.num_fine > 0)
        numbered = range(layers[0] - dst.first_layer, layers[-1] + 1 - dst.first_layer)
        src_memory, before = poison(extent(src), 1), poison(extent(dst), 2)
        ids = pairs.src_ids, pairs.dst_ids
        wanted = on_processor(program, numbered, *ids, pairs.num_fine, src_memory, before)
        from_ = on_device(src_memory, 0 if aligned else src_at)
        to = on_device(before, 0 if aligned else dst_at)
        stream.copy(
            program, *ids, src=from_.data_ptr(), dst=to.data_ptr(), layers=numbered, num_fine=pairs.num_fine
        )
        stream.synchronize()
        require_same(to, wanted, "copy")
        require_same(from_, src_memory, "the source")

    check()


def test_the_calibration_says_by_how_many_ctas_pages_are_staged() -> None:
    found = calibration.shared(0)
    measured = [rate.num_ctas for rate in found.rates()]
    assert measured in ([], [1, 2, 4, 8])  # nothing if there was no time
    assert found.num_ctas in (measured or [4])
    assert all(rate.to_host and rate.from_host for rate in found.rates())


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
@pytest.mark.parametrize("copy_engines", ["always", "calibrated"])
def test_layouts_of_every_kind_are_copied_to_and_from_the_host(
    direction: Literal["to_host", "to_device"], copy_engines: Literal["always", "calibrated"]
) -> None:
    import torch

    @settings(max_examples=100, deadline=None, database=None, print_blob=True)
    @given(transfers(), st.booleans())
    def check(example: Example, fine: bool) -> None:
        src, dst = example.src, example.dst
        layers = common_layers(src, dst)
        src_table, dst_table = np.array(example.src_table, np.uint32), np.array(example.dst_table, np.uint32)
        pairs = pair_units(src, dst, src_table, dst_table, example.tokens)
        program = compile_program(src, dst, heads=example.heads, fine=fine or pairs.num_fine > 0)
        numbered = range(layers[0] - dst.first_layer, layers[-1] + 1 - dst.first_layer)
        src_memory, before = poison(extent(src), 1), poison(extent(dst), 2)
        ids = pairs.src_ids, pairs.dst_ids
        wanted = on_processor(program, numbered, *ids, pairs.num_fine, src_memory, before)
        from_, to = torch.from_numpy(src_memory), torch.from_numpy(before)
        from_, to = (
            (from_.cuda(), to.pin_memory()) if direction == "to_host" else (from_.pin_memory(), to.cuda())
        )
        torch.cuda.synchronize()
        with CopyStream(copy_engines=copy_engines) as own:
            own.copy(
                program,
                *ids,
                src=from_.data_ptr(),
                dst=to.data_ptr(),
                layers=numbered,
                num_fine=pairs.num_fine,
                direction=direction,
            )
            own.synchronize()
        require_same(to, wanted, "copy")

    check()


@pytest.mark.parametrize("page_nbytes", [2048, 2064, 4096, 16384, 18432, 65536, 65552, 100_000 // 16 * 16])
@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("num_ctas", [1, 3, 132])
def test_pages_in_random_order_arrive(page_nbytes: int, bulk: bool, num_ctas: int, seed: int) -> None:
    num_pages, num_layers = 97, 3
    shape = num_layers, num_pages, page_nbytes
    layout = kvxfer.KVLayout.from_tensor(np.zeros(shape, np.uint8), axes="lbd")
    program = compile_program(layout, layout)
    random = np.random.default_rng(seed)
    src, before = (random.integers(0, 256, num_layers * num_pages * page_nbytes, np.uint8) for _ in range(2))
    src_ids, dst_ids = (random.permutation(num_pages)[:61].astype(np.uint32) for _ in range(2))
    wanted = on_processor(program, range(num_layers), src_ids, dst_ids, 0, src, before)
    with CopyStream(num_ctas=num_ctas, bulk=bulk) as own:
        from_, to = on_device(src, 0), on_device(before, 0)
        for _ in range(5):
            last = own.copy(program, src_ids, dst_ids, src=from_.data_ptr(), dst=to.data_ptr())
        own.synchronize()
        assert own.done == last
    require_same(to, wanted, f"pages of {page_nbytes}")


@pytest.mark.parametrize(("src_dtype", "dst_dtype"), list(itertools.permutations(DTYPES, 2)))
@pytest.mark.parametrize("saturate", [False, True])
def test_every_number_becomes_what_the_processor_makes_of_it(
    stream: CopyStream, src_dtype: str, dst_dtype: str, saturate: bool, seed: int
) -> None:
    # All patterns of 16 bits and of 8 bits; for float32, those in the upper half, and random lower halves.
    patterns = np.arange(1 << 16, dtype=np.uint32)
    if NBYTES[src_dtype] == 4:
        random = np.random.default_rng(seed).integers(0, 1 << 32, 1 << 16, np.uint32)
        src = np.concatenate([patterns << np.uint32(16), random]).view(np.uint8)
    else:
        src = patterns.astype({1: np.uint8, 2: np.uint16}[NBYTES[src_dtype]]).view(np.uint8)
    count = len(src) // NBYTES[src_dtype]
    num_blocks = count // 128

    def layout(dtype: str, scale: float) -> kvxfer.KVLayout:
        raw = np.zeros((1, num_blocks, 8, 16), {1: np.uint8, 2: np.uint16, 4: np.uint32}[NBYTES[dtype]])
        # Without a scale an int8 code has no value.
        scale = scale or (0.5 if dtype == "int8" else 0)
        scales = Quantization("tensor", (scale,), saturate=saturate) if scale else None
        return kvxfer.KVLayout.from_tensor(raw, axes="lbtd", dtype=dtype, quantization=scales)

    for src_scale, dst_scale in ((0.0, 0.0), (0.0, 0.37), (2.5, 0.0), (3e-3, 17.0)):
        program = compile_program(layout(src_dtype, src_scale), layout(dst_dtype, dst_scale))
        ids = np.arange(num_blocks, dtype=np.uint32)
        before = np.zeros(count * NBYTES[dst_dtype], np.uint8)
        wanted = on_processor(program, range(1), ids, ids, 0, src, before)
        from_, to = on_device(src, 0), on_device(before, 0)
        stream.copy(program, ids, ids, src=from_.data_ptr(), dst=to.data_ptr())
        stream.synchronize()
        require_same(to, wanted, f"{src_dtype} -> {dst_dtype} by {src_scale} and {dst_scale}")


def test_a_copy_waits_for_its_event_and_nothing_else_does(stream: CopyStream) -> None:
    import torch

    layout = kvxfer.KVLayout.from_tensor(np.zeros((1, 8, 4096), np.uint8), axes="lbd")
    program = compile_program(layout, layout)
    ids = np.arange(8, dtype=np.uint32)
    src, dst, other = (torch.zeros(8 * 4096, dtype=torch.uint8, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    model = torch.cuda.Stream()
    with torch.cuda.stream(model):
        torch.cuda._sleep(4_000_000_000)  # cycles, two seconds; everything else takes a thousandth of that
        src.fill_(7)
        event = torch.cuda.Event()
        event.record(model)
    with CopyStream() as waiting:
        waiting.wait_for(event.cuda_event)
        ticket = waiting.copy(program, ids, ids, src=src.data_ptr(), dst=dst.data_ptr())
        assert waiting.done < ticket
        stream.copy(program, ids, ids, src=src.data_ptr(), dst=other.data_ptr())
        stream.synchronize()
        assert waiting.done < ticket
        waiting.synchronize()
        assert waiting.done == ticket
    assert bool((dst == 7).all())


def test_memory_that_is_not_there_is_an_agent_error_and_ends_the_process_use_of_the_gpu() -> None:
    """Runs in its own process, since the error stays with the context."""
    import subprocess
    import sys

    code = """
import numpy as np, kvxfer
from kvxfer.gpu.copy_stream import CopyStream
from kvxfer.plan.compile import compile_program
layout = kvxfer.KVLayout.from_tensor(np.zeros((1, 8, 4096), np.uint8), axes="lbd")
ids = np.arange(8, dtype=np.uint32)
stream = CopyStream()
stream.copy(compile_program(layout, layout), ids, ids, src=16, dst=1 << 20)
try:
    stream.synchronize()
except kvxfer.AgentError as error:
    print("typed:", error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert "typed:" in run.stdout, run.stderr
