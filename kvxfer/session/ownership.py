"""Errors for objects of another agent: every agent accepts only its own objects.

Each verb makes its own comparison; those of transfers are in ``posting.py`` (`Poster.peer_of`).

Native code knows regions, peers, leases and commands by numbers that count from 1 in each agent, so another
agent's number would silently name a different object here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvxfer.errors import UsageError, invalid

if TYPE_CHECKING:
    from kvxfer.session.completion import Completions


class Owned(Protocol):
    """An object that belongs to one agent."""

    _completions: Completions


def foreign(mine: Completions, thing: Owned, what: str, instead: str) -> UsageError:
    """Returns the error for another agent's object, i.e. if ``thing._completions is not mine``.

    The caller compares, so that a correct call builds no message.

    Parameters
    ----------
    mine
        Completions of the agent whose verb was called.
    thing, what
        The object, and its name for the message.
    instead
        What to do, for the message.
    """
    theirs = thing._completions
    ours, others = distinguished(
        (mine.agent_name, mine.core.incarnation), (theirs.agent_name, theirs.core.incarnation)
    )
    return invalid(f"{what} belongs to {others}, but the call is to {ours}: {instead}")


def distinguished(first: tuple[str, bytes], second: tuple[str, bytes]) -> tuple[str, str]:
    """Returns two agents' names for messages, with incarnations if the names are equal."""
    if first[0] != second[0]:
        return f"agent {first[0]!r}", f"agent {second[0]!r}"
    a, b = (f"agent {name!r} (incarnation {incarnation.hex()[:8]})" for name, incarnation in (first, second))
    return a, b
