"""Architectures of GPUs: what is compiled for which devices."""

from __future__ import annotations

from typing import Final

#: Compute capability times ten; below it no kernel is compiled for.
LEAST_SM: Final = 80


def for_capability(major: int, minor: int) -> str:
    """Returns the architecture that devices of a compute capability have kernels compiled for.

    From 9.0 on it is the device's own, with all that it alone has (``"sm_90a"``). Before that there is no
    such thing, and what is compiled for 8.0 runs on 8.6 and 8.9 alike: one cubin for all of them.
    """
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}0"


def sm_of(architecture: str) -> int:
    """Returns the compute capability times ten: 90 of ``"sm_90a"``."""
    return int(architecture.removeprefix("sm_").rstrip("af"))
