"""The changelog's newest section is this version's, and has what readers need."""

from __future__ import annotations

import re

import kvxfer
from tests.release.interface import newest_notes, version

HEADINGS = ["Safety", "Performance", "Features", "Internals"]


def test_the_newest_section_is_of_this_version() -> None:
    heading, *lines = newest_notes().splitlines()
    # An unfinished section has no date yet; a tag is refused without one (.github/workflows/release.yml).
    named = re.fullmatch(r"## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d|not released)\)", heading)
    assert named, heading
    assert named[1] == version() == kvxfer.__version__
    headings = [line.removeprefix("### ") for line in lines if line.startswith("#")]
    assert headings == [each for each in HEADINGS if each in headings]
    summary = "\n".join(lines).partition("\n### ")[0].strip()
    assert summary, "what a user of the version before has to know stands on top"
