"""What a source of kernels declares, without what they do: for tests that include it and link them."""

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
    """Returns the place behind the brace that closes the block which `at` lies in."""
    depth = 1
    # A brace in a comment or in a text is none.
    for found in re.finditer(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"|[{}]', source[at:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return at + found.end()
    raise ValueError("a kernel without an end")
