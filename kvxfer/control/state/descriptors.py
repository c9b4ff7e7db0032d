"""How many descriptors the daemon may have open, and how many connections of each kind."""

from __future__ import annotations

import resource
from typing import Final

# 1,024 connections for each of two listeners; as many for processes that hand memory over, with a memfd each;
# 512 for agents; and the rest for files and the daemon's own agent.
_ENOUGH: Final = 8192
# Even if the limit is very low.
_LEAST: Final = 8


def raise_limit() -> None:
    """Raises the limit to what the daemon needs, as far as the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def at_most(count: int) -> int:
    """Returns the most connections of a kind: `count`, or an eighth of the descriptors if that is less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if soft == resource.RLIM_INFINITY else min(count, max(_LEAST, soft // 8))
