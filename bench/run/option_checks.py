"""What options of the commands have to be, and the words for those that are not. Pure.

Options are attributes of a dataclass; ``total_mib`` is ``--total-mib`` where words name it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvxfer.bench.errors import BenchError


def flag(name: str) -> str:
    """Returns an option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def check_one_of(option: str, given: str, known: Iterable[str]) -> None:
    """Raises `BenchError` when an option names what nobody knows."""
    names = tuple(known)
    if given not in names:
        raise BenchError(f"unknown {flag(option)} {given!r}; known are {', '.join(names)}")


def check_known(options: Any, **known: tuple[str, ...]) -> None:
    """Raises `BenchError` for the first of these options that is not among what is known of it."""
    for option, names in known.items():
        check_one_of(option, getattr(options, option), names)


def check_counts(options: Any, *names: str, at_least: int = 1) -> None:
    """Raises `BenchError` for the first of these options that counts fewer."""
    for name in names:
        if (given := getattr(options, name)) < at_least:
            raise BenchError(f"{flag(name)} is at least {at_least}, not {given}")


def check_above_zero(options: Any, *names: str) -> None:
    """Raises `BenchError` for the first of these options that is no finite number above 0."""
    for name in names:
        if not 0 < (given := getattr(options, name)) < float("inf"):
            raise BenchError(f"{flag(name)} is above 0, unlike {given:g}")


def check_layouts(options: Any) -> None:
    """Raises `BenchError` when one of ``src_layout`` and ``dst_layout`` is missing."""
    for name in ("src_layout", "dst_layout"):
        if not getattr(options, name):
            raise BenchError(f"{flag(name)} is missing: layouts are named at both ends")
