"""What identifies a cubin, and that every kernel's sources are known."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kvxfer.errors import UsageError
from kvxfer.gpu import architecture, sources
from kvxfer.gpu.kernels import KERNELS, Kernel, kernel_of

NATIVE = Path(__file__).parents[3] / "native"
COPY = kernel_of("copy_vectors")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, to be changed."""
    for folder in ("gpu", "include"):
        shutil.copytree(NATIVE / folder, tmp_path / folder)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    return tmp_path


def key(kernel: Kernel = COPY, arch: str = "sm_90a", options: str = "") -> str:
    return sources.key_of(kernel, arch, options)


def test_every_source_is_a_kernel_and_has_its_entry() -> None:
    names = {kernel.name for kernel in KERNELS}
    # The litmus test is gpu-check's, which compiles it itself.
    assert {file.stem for file in (NATIVE / "gpu").glob("*.cu")} == names | {"litmus"}
    for kernel in KERNELS:
        text = (NATIVE / kernel.source).read_text()
        assert re.search(rf'extern "C" __global__ .*\b{kernel.entry}\(', text, re.DOTALL), kernel.name


def test_kernels_are_in_the_order_of_the_native_ones() -> None:
    values = re.search(
        r"enum class Kernel[^{]*\{(.*?)\};", (NATIVE / "gpu/make_job.h").read_text(), re.DOTALL
    )
    assert values
    native = re.findall(r"\bk(\w+) = \d+,", values[1])
    order = ["".join(word.capitalize() for word in kernel.name.split("_")) for kernel in KERNELS]
    assert order == [name for name in native if name in order]


def test_headers_are_followed_to_the_last() -> None:
    files = sources.files_of(COPY)
    assert COPY.source in files
    assert {"gpu/kernel.cuh", "gpu/copy_job.h", "include/kvxfer/number.h", "gpu/rtc/cstdint"} <= set(files)
    for name, text in files.items():
        for included in re.findall(r'#include "([^"]+)"', text.decode()):
            assert any(other.endswith(included) for other in files), (name, included)


def test_a_change_of_any_file_is_another_key(tree: Path) -> None:
    keys = {key()}
    for name in sources.files_of(COPY):
        with (tree / name).open("a") as file:
            file.write("\n")
        keys.add(key())
    assert len(keys) == 1 + len(sources.files_of(COPY))


def test_architecture_and_options_and_kernel_are_in_the_key(tree: Path) -> None:
    # The same text under another kernel's name.
    shutil.copy(tree / COPY.source, tree / "gpu/other.cu")
    keys = {key(), key(arch="sm_80"), key(options="-O3"), key(Kernel("other", 80))}
    assert len(keys) == 4


def test_a_source_that_is_missing_is_an_installation_to_be_mended(tree: Path) -> None:
    (tree / COPY.source).unlink()
    with pytest.raises(UsageError, match=r"copy_vectors cannot be read .*: reinstall kvxfer") as caught:
        key()
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(
    ("capability", "name", "sm"),
    [((8, 0), "sm_80", 80), ((8, 9), "sm_80", 80), ((9, 0), "sm_90a", 90), ((10, 3), "sm_103a", 103),
     ((12, 0), "sm_120a", 120), ((7, 5), "sm_70", 70)],
)  # fmt: skip
def test_architectures_of_devices(capability: tuple[int, int], name: str, sm: int) -> None:
    assert architecture.for_capability(*capability) == name
    assert architecture.sm_of(name) == sm
