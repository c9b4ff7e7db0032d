"""Whose an object is: what belongs to one agent is refused by every other, in these words.

Each verb compares for itself: those of transfers in ``posting.py`` (`Poster.peer_of`), others beside theirs.

Native code knows regions, peers, leases and commands by numbers that count from 1 in each agent, so another
agent's object would quietly mean something else here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvxfer.errors import UsageError, invalid

if TYPE_CHECKING:
    from kvxfer.session.completion import Completions


class Owned(Protocol):
    """What belongs to one agent."""

    _completions: Completions


def foreign(mine: Completions, thing: Owned, what: str, instead: str) -> UsageError:
    """Returns the error of a verb that was passed another agent's object: ``thing._completions is not mine``.

    The caller compares, so that a good call makes no words.

    Parameters
    ----------
    mine
        The agent's whose verb was called.
    thing, what
        The object, and what to call it.
    instead
        What to do, for the message.
    """
    theirs = thing._completions
    ours, others = told_apart(
        (mine.agent_name, mine.core.incarnation), (theirs.agent_name, theirs.core.incarnation)
    )
    return invalid(f"{what} is of {others}, and this is a call of {ours}: {instead}")


def told_apart(first: tuple[str, bytes], second: tuple[str, bytes]) -> tuple[str, str]:
    """Returns what messages call two agents: their names, with incarnations where those are alike."""
    if first[0] != second[0]:
        return f"agent {first[0]!r}", f"agent {second[0]!r}"
    a, b = (f"agent {name!r} (incarnation {incarnation.hex()[:8]})" for name, incarnation in (first, second))
    return a, b
