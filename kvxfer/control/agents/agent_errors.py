"""Errors of calls to an agent."""

from __future__ import annotations


class CallRefused(Exception):  # noqa: N818
    """An agent, or the daemon on its behalf, refused or failed a call.

    Attributes
    ----------
    code
        Of docs/errors.md: ``not-permitted`` if the agent's ``daemon_may`` does not permit it, ``unsupported``
        for an unknown verb, ``exhausted`` if too much is in progress, or an error of the verb.
    words
        What happened, for people.
    """

    def __init__(self, code: str, words: str) -> None:
        super().__init__(f"{words} [{code}]")
        self.code = code
        self.words = words


class AgentGone(Exception):  # noqa: N818
    """The agent is not attached, or went away during a call, which it may or may not have carried out."""
