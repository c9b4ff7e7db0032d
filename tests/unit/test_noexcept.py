"""Functions of the core that must not throw take no memory, or have a handler for when there is none."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.noexcept import findings

ROOT = Path(__file__).parents[2]
BUILD = "cp{0}{1}-cp{0}{1}-linux_{2}".format(*sys.version_info[:2], platform.machine())
CORE = ROOT / "build" / BUILD / "native/libkvxfer_core.a"

# Functions, by the beginnings of their names, that may; each with its reason.
MAY = {
    "kvxfer::fabric::Endpoint::": "nine letters fit into a string itself",
    "kvxfer::FaultyTransport::": "faults are injected by tests alone",
    "kvxfer::Runtime::~Runtime": "closes an agent that nobody has closed",
    "kvxfer::door::Agent::~Agent": "the same",
}

SAMPLE = """
#include <new>
#include <string>
#include <vector>
void take(std::vector<int>& list) { list.push_back(1); }
void inner(std::vector<int>& list) { take(list); }
[[gnu::noinline]] void dies(std::vector<int>& list) noexcept { inner(list); }
[[gnu::noinline]] void says(std::string& text) noexcept { text += "more than fits into a string itself"; }
[[gnu::noinline]] void catches(std::vector<int>& list) noexcept {
  try { inner(list); } catch (const std::bad_alloc&) {}
}
[[gnu::noinline]] void catches_another(std::vector<int>& list) noexcept {
  try { inner(list); } catch (const int&) {}
}
[[gnu::noinline]] void passes(std::vector<int>& list) { inner(list); }
"""

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or any(shutil.which(tool) is None for tool in ("g++", "nm", "objdump")),
    reason="reads x86-64 code of g++",
)


def shared(to: Path, *parts: str) -> Path:
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(to), *parts], check=True, capture_output=True)
    return to


@pytest.mark.parametrize("level", ["-O1", "-O3"])
def test_the_check_finds_what_dies_and_nothing_else(level: str, tmp_path: Path) -> None:
    (tmp_path / "sample.cpp").write_text(SAMPLE)
    library = shared(tmp_path / "sample.so", level, "-std=c++20", str(tmp_path / "sample.cpp"))
    assert {name.partition("(")[0] for name in findings(library)} == {"dies", "says", "catches_another"}


@pytest.mark.skipif(not CORE.exists(), reason="the core was built elsewhere")
def test_no_function_of_the_core_dies_for_want_of_memory(tmp_path: Path) -> None:
    """Mend by a handler, by room that is made before (core/in_room.h), or by leaving out noexcept."""
    whole = "-Wl,--whole-archive", str(CORE), "-Wl,--no-whole-archive"
    found = findings(shared(tmp_path / "core.so", *whole))
    found = {name: calls for name, calls in found.items() if not name.startswith(tuple(MAY))}
    assert not found, "\n".join(
        f"{name} calls {', '.join(sorted(calls))}"
        for name, calls in (
            (re.sub(r"std::allocator<[^<>]*>", "...", k), v) for k, v in sorted(found.items())
        )
    )
