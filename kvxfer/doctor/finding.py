"""One examined thing: what was found, whether it is good, why it matters, what to change."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


class State(enum.StrEnum):
    """What a finding means for kvxfer."""

    GOOD = "good"
    #: A plain fact, or something that could not be examined.
    NOTE = "note"
    #: It works, but slower or with less than this machine could have.
    LIMITS = "limits"
    #: A requirement cannot work.
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding, in plain words.

    Attributes
    ----------
    subject
        Groups findings, e.g. ``"transports"``.
    name
        What was looked at, e.g. ``"shm"``; unique within its subject.
    state
        What it means.
    found
        What is there, with figures.
    why
        Why it matters for kvxfer.
    change
        The command or setting that makes it better; ``""`` if nothing needs a change.
    """

    subject: str
    name: str
    state: State
    found: str
    why: str
    change: str = ""

    def to_dict(self) -> dict[str, str]:
        """Returns it as JSON's types."""
        return {name: str(value) for name, value in asdict(self).items()}


#: Looks at one subject below a root folder: "/" for the machine, a made-up tree in a test.
Probe = Callable[[Path], list[Finding]]


def run_probe(subject: str, probe: Probe, root: Path) -> list[Finding]:
    """Runs a probe; an exception becomes a note."""
    try:
        return probe(root)
    except Exception as error:
        return [
            Finding(
                subject,
                "probe",
                State.NOTE,
                f"could not be examined: {type(error).__name__}: {error}",
                "this subject was not examined; the other subjects are not affected",
                "report this line with `uname -a`: a probe should work on every machine",
            )
        ]
