"""Extracts the declarations of kernels from a source, for tests that include it and link the kernels."""

from __future__ import annotations

import re

_KERNEL = re.compile(r'extern "C" __global__ [^{;]*\{')


def declarations(source: str) -> str:
    """Returns a source whose kernels have no bodies."""
    parts: list[str] = []
    at = 0
    for found in _KERNEL.finditer(source):
        parts += [source[at : found.end() - 1].rstrip(), ";"]
        at = _end_of_block(source, found.end())
    return "".join([*parts, source[at:]])


def _end_of_block(source: str, at: int) -> int:
    """Returns the index after the brace that closes the block around `at`."""
    depth = 1
    # Braces in comments and string literals do not count.
    for found in re.finditer(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"|[{}]', source[at:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return at + found.end()
    raise ValueError("a kernel without an end")
