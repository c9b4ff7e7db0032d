"""C++ tests that need an RDMA device: one of CMake's programs for each tests/native/test_rdma_*.cpp."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import pytest

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("machine")]

ROOT: Final = Path(__file__).parents[2]
#: `make test-rdma` builds them.
PROGRAMS: Final = ROOT / "build" / "plain" / "tests" / "native"
NAMES: Final = sorted(path.stem for path in (ROOT / "tests" / "native").glob("test_rdma_*.cpp"))


@pytest.mark.parametrize("name", NAMES)
def test_program(name: str) -> None:
    subprocess.run([PROGRAMS / name], cwd=PROGRAMS, check=True, timeout=240)  # the seed is in the environment
