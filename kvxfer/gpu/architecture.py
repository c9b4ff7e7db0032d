"""GPU architectures: which one kernels are compiled for on each device."""

from __future__ import annotations

from typing import Final

#: The least compute capability that kernels are compiled for, times ten.
LEAST_SM: Final = 80


def for_capability(major: int, minor: int) -> str:
    """Returns the architecture for which kernels are compiled for devices of a compute capability.

    From 9.0 on it is the device's own architecture with its specific features (``"sm_90a"``). Older devices
    have no such variant. Code for 8.0 also runs on 8.6 and 8.9, so they share one cubin.
    """
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}0"


def sm_of(architecture: str) -> int:
    """Returns the compute capability times ten: 90 of ``"sm_90a"``."""
    return int(architecture.removeprefix("sm_").rstrip("af"))
