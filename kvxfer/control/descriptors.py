"""How many descriptors the daemon may have open, and how many of them each kind of connection."""

from __future__ import annotations

import resource
from typing import Final

# 1,024 connections of each of two listeners, as many of processes that hand memory over with a memfd each,
# 512 of agents, files, and what the daemon's own agent has open.
_ENOUGH: Final = 8192
# However few there are.
_LEAST: Final = 8


def raise_limit() -> None:
    """Has as many as that takes, as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def at_most(count: int) -> int:
    """Returns how many connections of a kind there may be: so many, or an eighth of what there is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if soft == resource.RLIM_INFINITY else min(count, max(_LEAST, soft // 8))
