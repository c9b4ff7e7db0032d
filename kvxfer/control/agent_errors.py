"""How asking an agent fails."""

from __future__ import annotations


class CallRefused(Exception):  # noqa: N818
    """An agent, or the daemon for it, did not do what was asked.

    Attributes
    ----------
    code
        Of docs/errors.md: ``not-permitted`` where the agent's ``daemon_may`` has it not, ``unsupported`` for
        a verb that it does not know, ``exhausted`` where too much is under way, and what its verbs raise.
    words
        What happened, for people.
    """

    def __init__(self, code: str, words: str) -> None:
        super().__init__(f"{words} [{code}]")
        self.code = code
        self.words = words


class AgentGone(Exception):  # noqa: N818
    """The agent is not attached, or went while a call was under way, which may have been done or not."""
