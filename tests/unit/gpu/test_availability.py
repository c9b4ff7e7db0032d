"""Whether kernels can run here, and why not: this machine, made-up drivers, packages that are missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# The part of libcuda.so.1 that is called before anything runs on a GPU. The environment defines the GPUs.
LIBCUDA = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int number(const char* name) { const char* text = getenv(name); return text ? atoi(text) : 0; }
int cuDriverGetVersion(int* version) { *version = number("FAKE_VERSION"); return 0; }
int cuInit(unsigned flags) { return number("FAKE_STATUS"); }
int cuDeviceGetCount(int* count) { *count = number("FAKE_COUNT"); return 0; }
int cuDeviceGet(int* device, int index) { *device = 70 + index; return 0; }
int cuDeviceGetName(char* name, int size, int device) { snprintf(name, size, "Fake %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t* nbytes, int device) { *nbytes = 80ull << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? number("FAKE_SM") / 10 : number("FAKE_SM") % 10;
  return 0;
}
int cuGetErrorString(int status, const char** words) { *words = "out of smoke"; return 0; }
"""
ASK = (
    "import json, sys\n"
    "from kvxfer.gpu import availability\n"
    "found = availability.availability(int(sys.argv[1]))\n"
    "print(json.dumps([found.usable, found.reason, found.driver_version, dict(found.origins)]))\n"
)


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that reports the GPUs that the environment defines."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(LIBCUDA)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"],
        check=True,
        timeout=200,
    )
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with cuda-core and without NVRTC, to be used with ``python -S``."""
    import numpy as np

    folder = tmp_path_factory.mktemp("packages")
    site = Path(str(importlib.metadata.distribution("cuda-core").locate_file("")))
    for found in (Path(np.__file__).parent, *site.glob("numpy.libs"), *site.glob("cuda*")):
        (folder / found.name).symlink_to(found)
    return folder


def run(environment: dict[str, str], *arguments: str) -> Any:
    """Runs an interpreter, and returns what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ask(
    environment: dict[str, str], *flags: str, index: int = 0
) -> tuple[bool, str, list[int], dict[str, str]]:
    usable, reason, version, origins = run(environment, "-P", *flags, "-c", ASK, str(index))
    assert usable == (not reason)
    return usable, reason, version, origins


def doctor(environment: dict[str, str]) -> dict[str, dict[str, str]]:
    """Returns the doctor's findings about kernels, by name."""
    script = (
        "import json\n"
        "from kvxfer.doctor import devices\n"
        "print(json.dumps([finding.to_dict() for finding in devices.gpu_kernels()]))"
    )
    return {finding["name"]: finding for finding in run(environment, "-c", script)}


def driver(folder: Path, **environment: str) -> dict[str, str]:
    defaults = {"FAKE_VERSION": "13050", "FAKE_COUNT": "1", "FAKE_SM": "90"}
    return {"LD_LIBRARY_PATH": str(folder), **defaults, **environment}


def test_this_machine_is_usable_or_says_why_not() -> None:
    usable, reason, _, origins = ask({})
    if usable:
        assert origins
    else:
        # What is missing, and then what to do about it.
        assert re.fullmatch(r"[^\n]+: [^\n]+", reason)
    if not Path("/proc/driver/nvidia").exists():
        assert "NVIDIA driver" in reason


@pytest.mark.parametrize(
    ("environment", "index", "words"),
    [
        (
            {"FAKE_COUNT": "0"},
            0,
            "^the NVIDIA driver offers no GPU to this process: check CUDA_VISIBLE_DEVICES",
        ),
        ({"FAKE_STATUS": "100"}, 0, "^the NVIDIA driver offers no GPU to this process: check CUDA_V"),
        ({"FAKE_STATUS": "803"}, 0, "failed in cuInit with 803: out of smoke: run nvidia-smi"),
        ({}, 1, "^there is no GPU 1: the driver offers 1 to this process$"),
        (
            {"FAKE_SM": "75"},
            0,
            "^Fake 70 has compute capability 7.5, but the kernels need 8.0: use a newer GPU$",
        ),
        ({"FAKE_VERSION": "11080"}, 0, "makes kernels that this driver does not load: update the driver"),
    ],
)
def test_a_driver_that_is_of_no_use(
    libcuda: Path, environment: dict[str, str], index: int, words: str
) -> None:
    _, reason, version, _ = ask(driver(libcuda, **environment), index=index)
    assert re.search(words, reason)
    assert version == ([11, 8] if "FAKE_VERSION" in environment else [13, 5])


def test_a_driver_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    _, reason, _, _ = ask({"LD_LIBRARY_PATH": str(tmp_path)})
    assert re.search(r"libcuda\.so\.1 cannot be loaded: .*install NVIDIA's driver again", reason)


def test_with_compiler_and_driver_kernels_are_usable(libcuda: Path, tmp_path: Path) -> None:
    environment = driver(libcuda, FAKE_SM="86", KVXFER_CACHE_DIR=str(tmp_path))
    usable, _, _, origins = ask(environment)
    assert usable
    assert set(origins) >= {"copy_vectors"}
    assert "copy_bulk" not in origins  # below 9.0
    assert set(origins.values()) <= {"prebuilt", "compiled"}
    assert not list(tmp_path.iterdir())  # only asked


def test_without_cuda_core(libcuda: Path, packages: Path, tmp_path: Path) -> None:
    for path in packages.iterdir():
        if not path.name.startswith("cuda"):
            (tmp_path / path.name).symlink_to(path.resolve())
    _, reason, _, _ = ask(driver(libcuda, PYTHONPATH=f"{tmp_path}:{ROOT}"), "-S")
    assert reason.startswith("cuda-core, which compiles and loads GPU kernels, is not installed")
    assert reason.endswith(": pip install kvxfer[gpu], or kvxfer[gpu-cu12] if the driver is for CUDA 12")


def test_without_nvrtc_and_without_a_prebuilt_cubin(libcuda: Path, packages: Path) -> None:
    # There is no such GPU, so no kernel was prebuilt for it.
    _, reason, _, _ = ask(driver(libcuda, PYTHONPATH=f"{packages}:{ROOT}", FAKE_SM="99"), "-S")
    assert reason.startswith(
        "the GPU kernel copy_vectors for sm_99a is not part of this installation, and NVRTC, which "
        "compiles GPU kernels, was not found"
    )
    assert ": pip install kvxfer[gpu]" in reason


def test_doctor_names_every_gpu_and_where_its_kernels_are_from(libcuda: Path, tmp_path: Path) -> None:
    shown = doctor(driver(libcuda, FAKE_COUNT="2", KVXFER_CACHE_DIR=str(tmp_path)))
    assert set(shown) == {f"GPU {index} {what}" for index in (0, 1) for what in ("kernels", "host copies")}
    assert "not calibrated yet" in shown["GPU 1 host copies"]["found"]
    found = shown["GPU 1 kernels"]["found"]
    assert found.startswith("Fake 71 (sm_90a, 80 GiB), the driver is for CUDA 13.5; copy_vectors ")
    assert re.search("is prebuilt|will be compiled when it is first loaded", found)
    assert shown["GPU 1 kernels"]["change"] == ""


def test_doctor_says_what_a_gpu_lacks_and_what_to_do(libcuda: Path) -> None:
    old = doctor(driver(libcuda, FAKE_SM="75"))["GPU 0 kernels"]
    assert "kernels cannot run: Fake 70 has compute capability 7.5" in old["found"]
    assert old["change"] == "use a newer GPU"
    failing = doctor(driver(libcuda, FAKE_STATUS="803"))["GPU kernels"]
    assert failing["found"].endswith("failed in cuInit with 803: out of smoke")
    assert "nvidia-smi" in failing["change"]


def test_gpu_check_ends_with_3_and_a_sentence_before_anything_is_built(libcuda: Path, tmp_path: Path) -> None:
    for folder in (".ci", "kvxfer"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=lambda folder, _: ["bench", "connectors"])
    before = set(tmp_path.iterdir())
    done = subprocess.run(
        [tmp_path / ".ci/gpu-check"],
        env={**os.environ, **driver(libcuda, FAKE_COUNT="0"), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.startswith("gpu-check: nothing was run: the NVIDIA driver offers no GPU")
    assert done.stderr.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


def test_importing_it_imports_no_cuda() -> None:
    script = (
        "import sys\n"
        "from kvxfer.gpu import availability, compiler, loading, origin, prebuilt\n"
        "print([name for name in sys.modules if name.startswith(('cuda', 'torch', 'kvxfer._native'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
