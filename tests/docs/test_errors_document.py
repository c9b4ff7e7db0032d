"""docs/errors.md has the cause and the cure of each code, in the order of the codes."""

from __future__ import annotations

import re
from pathlib import Path

from kvxfer.errors import CODE_NAMES

DOCUMENT = (Path(__file__).parents[2] / "docs/errors.md").read_text()


def test_each_code_has_its_cause_and_its_cure() -> None:
    sections = re.split(r"^### ", DOCUMENT, flags=re.MULTILINE)[1:]
    named = [section.partition("\n")[0] for section in sections]
    assert named == list(CODE_NAMES.values())
    for section in sections:
        text = re.split(r"^## ", section, flags=re.MULTILINE)[0]
        assert re.search(r"^\*\*Cause\.\*\* \S.*\n\*\*Cure\.\*\* \S", text, re.MULTILINE), section
