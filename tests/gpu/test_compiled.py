"""Inspects kernels as NVRTC compiles them, without a GPU: registers, spills and instructions."""

from __future__ import annotations

import importlib.metadata
import io
import re
import subprocess
from pathlib import Path

import pytest

from kvxfer.errors import UsageError
from kvxfer.gpu import compiler, include_path, sources, store_ring_nbytes
from kvxfer.gpu.compiler import Compilation
from kvxfer.gpu.kernels import KERNELS, Kernel, kernel_of

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
COMPILED = [(kernel.name, arch) for kernel in KERNELS for arch in ARCHITECTURES if kernel.runs_on(arch)]
# The instructions that move the bytes. EF is "evict first". Bulk copies go to shared memory and from it.
_VECTORS = {"LDG.E.EF.128", "STG.E.EF.128"}
MOVES = {"copy_vectors": _VECTORS, "copy_bulk": {"UBLKCP.S.G", "UBLKCP.G.S"}, "convert": _VECTORS}

_compilations: dict[tuple[str, str], Compilation] = {}


def compilation(name: str, architecture: str) -> Compilation:
    """Compiles a kernel, once for all tests."""
    # Nothing is skipped here: every developer who changes a kernel must see these results.
    try:
        compiler.version()
    except UsageError as error:
        pytest.fail(f"`make unit` installs what this test needs (pyproject.toml, dev): {error}")
    if (name, architecture) not in _compilations:
        _compilations[name, architecture] = compiler.compile_kernel(kernel_of(name), architecture)
    return _compilations[name, architecture]


def tool(name: str) -> Path:
    """Returns the file of one of NVIDIA's tools, from its wheel."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"`make unit` installs nvidia-cuda-{name} (pyproject.toml, dev)")
    return next(Path(str(file.locate())) for file in files if file.name == name)


def dump(code: bytes, folder: Path) -> str:
    """Returns a cubin's attributes and its instructions, as cuobjdump prints them."""
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    cuobjdump = tool("cuobjdump")
    assert tool("nvdisasm").parent == cuobjdump.parent  # where cuobjdump looks for it
    done = subprocess.run([cuobjdump, "-elf", "-sass", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def attribute(dumped: str, name: str) -> int:
    """Returns the first number of an attribute of the cubin's only kernel."""
    values = re.findall(rf"Attribute:\s*EIATTR_{name}\n.*\n\s*Value:\s*0x([0-9a-f]+)", dumped)
    assert len(values) == 1, name
    return int(values[0], 16)


def instructions(dumped: str) -> set[str]:
    """Returns the names of all instructions, e.g. ``{"LDG.E.EF.128", ...}``."""
    return set(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", dumped, re.MULTILINE))


@pytest.mark.parametrize(("name", "architecture"), COMPILED)
def test_registers_are_within_the_launch_bounds_and_none_is_spilled(
    name: str, architecture: str, tmp_path: Path
) -> None:
    made = compilation(name, architecture)
    assert f"'{kernel_of(name).entry}' for '{architecture}'" in made.log
    used = [int(count) for count in re.findall(r"Used (\d+) registers", made.log)]
    assert len(used) == 1, made.log
    dumped = dump(made.cubin.code, tmp_path)
    # Of the 65,536 registers of a multiprocessor. They are allocated to warps in units of 8 per thread.
    given = -(-used[0] // 8) * 8
    assert given * attribute(dumped, "MAX_THREADS") <= 65_536
    spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", made.log)
    assert len(spills) == 3, made.log
    assert set(spills) == {"0"}, made.log
    assert not {name for name in instructions(dumped) if name.startswith(("LDL", "STL"))}


@pytest.mark.parametrize(("name", "architecture"), COMPILED)
def test_the_compiler_has_no_warning(name: str, architecture: str) -> None:
    assert "warning" not in compilation(name, architecture).log.lower()


@pytest.mark.parametrize(("name", "architecture"), COMPILED)
def test_bytes_move_16_at_a_time_or_in_bulk(name: str, architecture: str, tmp_path: Path) -> None:
    found = instructions(dump(compilation(name, architecture).cubin.code, tmp_path))
    assert MOVES[name] <= found, sorted(found)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.name))
def test_every_kernel_runs_from_its_least_architecture_on(kernel: Kernel) -> None:
    if kernel.runs_on("sm_80"):
        return
    with pytest.raises(
        UsageError, match=rf"needs sm_{kernel.least_sm} or later, but this GPU is sm_80"
    ) as caught:
        compiler.compile_kernel(kernel, "sm_80")
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_litmus_test_compiles_and_fences_as_copies_do(architecture: str, tmp_path: Path) -> None:
    made = compiler.compile_kernel(Kernel("litmus", 80), architecture)
    assert "warning" not in made.log.lower()
    for entry in ("say", "say_unfenced", "see"):
        assert f"'kvxfer_litmus_{entry}' for '{architecture}'" in made.log
    dumped = dump(made.cubin.code, tmp_path)
    said = {name: code for name, code in _functions(dumped) if "_say" in name}
    assert set(said) == {"kvxfer_litmus_say", "kvxfer_litmus_say_unfenced"}
    assert "MEMBAR" in said["kvxfer_litmus_say"]
    assert "MEMBAR" not in said["kvxfer_litmus_say_unfenced"]


def _functions(dumped: str) -> list[tuple[str, str]]:
    """Returns each function's name and its instructions, from cuobjdump's output."""
    parts = re.split(r"Function : (\w+)", dumped)
    return list(zip(parts[1::2], parts[2::2], strict=True))


# ---- kvxfer/device.cuh in somebody else's kernel -------------------------------------------------

EXAMPLES = sources.ROOT / "gpu" / "examples"
FIRES = """
#include "kvxfer/device.cuh"
extern "C" __global__ void fires(unsigned* word) { kvxfer::fire(word, 7); }
"""


def compiled_by_its_author(code: str, architecture: str) -> bytes:
    """Compiles with the folder of kvxfer's header and nothing else of kvxfer."""
    return compiled_with_log(code, architecture)[0]


def compiled_with_log(code: str, architecture: str) -> tuple[bytes, str]:
    """Compiles likewise, and also returns what ptxas reports about registers and spills."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(arch=architecture, include_path=[include_path()], ptxas_options=["-v"])
    program = Program(code, "c++", options)
    try:
        return bytes(program.compile("cubin", logs=log).code), log.getvalue()
    finally:
        program.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_tells_the_host_is_fenced_and_of_system_scope(architecture: str, tmp_path: Path) -> None:
    arrives, posts, fires = (
        instructions(dump(compiled_by_its_author(code, architecture), tmp_path))
        for code in (
            (EXAMPLES / "write_layer.cu").read_text(),
            (EXAMPLES / "post_pages.cu").read_text(),
            FIRES,
        )
    )
    for found in (arrives, posts, fires):
        assert any(name.startswith("MEMBAR") and name.endswith("SYS") for name in found), sorted(found)
    assert any(name.startswith(("RED", "ATOM")) and "STRONG.SYS" in name for name in arrives), sorted(arrives)
    for found in (posts, fires):
        assert any(name.startswith("ST") and "STRONG.SYS" in name for name in found), sorted(found)
    # The kernel reads the host's count across the bus; the place in the ring is in the GPU's own memory.
    assert any(name.startswith("LD") and "STRONG.SYS" in name for name in posts), sorted(posts)
    assert any(name.startswith("ATOM") and "CAS" in name and "STRONG.GPU" in name for name in posts), sorted(
        posts
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pages_are_stored_16_bytes_at_a_time_and_then_told_at_system_scope(
    architecture: str, tmp_path: Path
) -> None:
    code = compiled_by_its_author((EXAMPLES / "store_pages.cu").read_text(), architecture)
    found = instructions(dump(code, tmp_path))
    assert {name for name in found if name.startswith("STG") and "128" in name}, sorted(found)
    assert any(name.startswith("MEMBAR") and name.endswith("SYS") for name in found), sorted(found)
    assert any(name.startswith(("RED", "ATOM")) and "STRONG.SYS" in name for name in found), sorted(found)
    assert any(name.startswith("LD") and "STRONG.SYS" in name for name in found), sorted(found)


BULK = {"UBLKCP.S.G", "UBLKCP.G.S"}  # to shared memory, and from it


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pages_are_stored_in_bulk_from_sm_90_on_and_by_vectors_before(
    architecture: str, tmp_path: Path
) -> None:
    code, log = compiled_with_log((EXAMPLES / "store_in_bulk.cu").read_text(), architecture)
    assert "warning" not in log.lower()
    spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
    assert len(spills) == 2 * 3, log
    assert set(spills) == {"0"}, log
    kernels = dict(_functions(dump(code, tmp_path)))
    assert set(kernels) == {"store_pages_in_bulk", "rotate_and_store"}
    for name, body in kernels.items():
        found = instructions(body)
        # Used where bulk copies cannot be: at addresses on no boundary, and for every page before sm_90.
        assert {name for name in found if name.startswith("STG") and "128" in name}, sorted(found)
        if architecture == "sm_80":
            assert not BULK & found, sorted(found)
            continue
        # Pages that were computed in shared memory need no load.
        assert BULK & found == (BULK if name == "store_pages_in_bulk" else {"UBLKCP.G.S"}), sorted(found)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_what_is_stored_in_bulk_is_waited_for_and_fenced_before_it_is_told(
    architecture: str, tmp_path: Path
) -> None:
    code = compiled_by_its_author((EXAMPLES / "store_in_bulk.cu").read_text(), architecture)
    body = dict(_functions(dump(code, tmp_path)))["rotate_and_store"]
    names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", body, re.MULTILINE)
    order = ["FENCE.VIEW.ASYNC", "BAR.SYNC", "UBLKCP.G.S", "DEPBAR", "FENCE.VIEW.ASYNC", "BAR.SYNC", "MEMBAR"]
    at = names.index("STS")  # the page is computed
    for wanted in order:
        at = next((k for k in range(at, len(names)) if names[k].startswith(wanted)), len(names))
        assert at < len(names), f"no {wanted} where it should be: {names}"
    told = [k for k, name in enumerate(names) if name.startswith(("RED", "ATOM")) and "STRONG.SYS" in name]
    assert told
    assert at < told[0], names


# Many kernels for sm_90 are built like this: some warps compute and store, others have other work.
SPECIALISED = """
#include "kvxfer/device.cuh"
extern "C" __global__ void __launch_bounds__(160)
    specialised(uint4* theirs, const uint4* ours, unsigned num_pages, unsigned* word) {
  constexpr unsigned kPage = 256;  // vectors
  __shared__ uint4 pages[2][kPage];
  __shared__ kvxfer::StoreRing<> ring;
  if (threadIdx.x >= 128) return;
  kvxfer::PageStores stores(&ring, kvxfer::Threads{threadIdx.x, 128, 1});
  for (unsigned page = 0; page < num_pages; ++page) {
    stores.wait_until_read<2>();  // two are stored in each round
    pages[page % 2][threadIdx.x] = pages[page % 2][threadIdx.x + 128] = {page, 1, 2, 3};
    stores.store(theirs + 2 * page * kPage, pages[page % 2], sizeof pages[0]);
    stores.store(theirs + (2 * page + 1) * kPage, ours + page * kPage, sizeof pages[0]);
  }
  stores.arrive(word);
}
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_some_warps_of_a_kernel_store_with_a_ring_that_it_declares(architecture: str, tmp_path: Path) -> None:
    code, log = compiled_with_log(SPECIALISED, architecture)
    spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
    assert spills == ["0"] * 3, log
    found = instructions(dump(code, tmp_path))
    assert BULK & found == (set() if architecture == "sm_80" else BULK), sorted(found)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8, 9, 27])
def test_what_a_ring_takes_of_shared_memory_is_what_the_compiler_says(num_stages: int) -> None:
    assert compiled_by_its_author(
        f"""
        #include "kvxfer/device.cuh"
        static_assert(sizeof(kvxfer::StoreRing<{num_stages}>) == {store_ring_nbytes(num_stages)});
        static_assert(alignof(kvxfer::StoreRing<{num_stages}>) == 128);
        """,
        "sm_80",
    )


def test_a_ring_of_one_stage_is_none() -> None:
    with pytest.raises(ValueError, match="two stages or more, not 1"):
        store_ring_nbytes(1)
