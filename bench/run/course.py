"""How a run goes: how far it is, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.options import described


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` steps, and what happens now or has just happened."""

    done: int
    total: int
    words: str


Say = Callable[[Progress], None]


def result_of(bench: str, options: Any, measure: Callable[[], Message], **known: Any) -> Message:
    """Returns the result of a run as one JSON object; ``verified`` is false when a check failed.

    It has the options, what is ``known`` beforehand, and what ``measure`` returns.
    """
    result = {"bench": bench, **described(options), **known}
    try:
        return {**result, **measure(), "verified": True}
    except CheckFailedError as error:
        return {**result, "verified": False, "failure": str(error)}
