"""What native/gpu calls of the CUDA driver, beside NVIDIA's headers: names, arguments, structs, numbers."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECK = ROOT / "tests/native/cuda_abi/driver_abi.cpp"
DRIVER = ROOT / "native/gpu"


def headers() -> Path:
    """Returns the folder of NVIDIA's headers, as its wheel brings them."""
    try:
        files = importlib.metadata.files("nvidia-cuda-runtime") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("`make unit` installs nvidia-cuda-runtime (pyproject.toml, dev)")
    return next(Path(str(file.locate())).parent for file in files if file.name == "cuda.h")


def compiled(native: Path) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "what built the native module is gone: install a C++ compiler"
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-isystem{headers()}", f"-I{native}"]
    return subprocess.run(
        [*command, f"-I{ROOT / 'native/include'}", CHECK], capture_output=True, text=True, check=False
    )


def test_what_is_declared_is_what_nvidia_declares() -> None:
    done = compiled(ROOT / "native")
    assert done.returncode == 0, done.stderr


def test_every_function_that_is_looked_up_is_compared_under_the_name_that_is_looked_up() -> None:
    looked_up = re.findall(r'find\(driver\.(\w+), "(\w+)"\)', (DRIVER / "driver.cpp").read_text())
    compared = re.findall(r"KVXFER_SAME\((\w+), (\w+)\);", CHECK.read_text())
    assert len(looked_up) > 40
    assert looked_up == compared
    versions = re.findall(
        r'find_if_there\(driver\.(\w+), "(\w+)", (\d+)\)', (DRIVER / "driver.cpp").read_text()
    )
    assert len(versions) == 4
    for member, symbol, version in versions:
        assert f"KVXFER_SAME_AS({member}, PFN_{symbol}_v{version});" in CHECK.read_text()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("int (*stream_write)(Stream stream, Address address,", "int (*stream_write)(Address address,"),
        ("int (*context_synchronize)();", "int (*context_synchronize)(unsigned flags);"),
        ("std::size_t src_x_nbytes = 0, src_y = 0;", "std::size_t src_y = 0, src_x_nbytes = 0;"),
        ("unsigned flags = 1; ", "unsigned flags = 2; "),
        ("kFabricHandle = 8;", "kFabricHandle = 4;"),
        ("unsigned char compression = 0, rdma_capable = 0;", "unsigned short compression = 0;"),
    ],
)
def test_what_differs_does_not_compile(right: str, wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / "gpu"
    folder.mkdir()
    text = (DRIVER / "driver.h").read_text()
    assert text.count(right) == 1
    (folder / "driver.h").write_text(text.replace(right, wrong))
    done = compiled(tmp_path)
    assert done.returncode != 0
    assert "driver_abi.cpp" in done.stderr
