"""Programs of the distribution that tests run."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Final

import pytest

_FINDER: Final = Path(__file__).parents[1] / ".ci" / "program"


@functools.cache
def system_program(package: str, name: str) -> str:
    """Returns where a program of a Debian package is; skips the test where it cannot be had."""
    found = subprocess.run(
        [_FINDER, package, name], capture_output=True, text=True, timeout=300, check=False
    ).stdout.strip()
    if not found:
        pytest.skip(f"no {name} (Debian's {package})")
    return found
