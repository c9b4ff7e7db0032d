"""No part of a released interface disappears or changes without notice (docs/versions.md)."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")
pytest.importorskip("prometheus_client", reason="the extra control is not installed")
pytest.importorskip("typer", reason="the extra cli is not installed")

from tests.release.interface import (
    RECORDED,
    Interface,
    breaks,
    collect,
    may_break,
    newest_notes,
    version,
    violations,
)


@pytest.fixture(scope="module")
def current() -> Interface:
    return collect()


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def test_what_the_last_release_had_is_there(recorded: dict[str, Any], current: Interface) -> None:
    assert violations(recorded, current, version(), newest_notes()) == []


# Interfaces that another release could have: this one's without a part, or with another.
BROKEN: dict[str, tuple[str, str, str | None]] = {
    "a name is gone": ("kvxfer.use_huge_pages", "", None),
    "a verb is gone": ("kvxfer.Agent.read", "", None),
    "an argument is gone": ("kvxfer.Agent.read", "priority", None),
    "an argument has another place": ("kvxfer.Agent.connect", "to", "argument 2, required"),
    "another default": ("kvxfer.Agent.close", "timeout_s", "argument 1, 60.0 by default"),
    "an argument more has to be given": ("kvxfer.Agent.read", "more", "by name, required"),
    "a coroutine is none": ("kvxfer.Agent.connect", "is", "function"),
    "an option is gone": ("kvxfer.AgentOptions", "listen", None),
    "an attribute is gone": ("kvxfer.KvxferError.code", "", None),
    "a state has another word": ("kvxfer.TransferState.DONE", "is", "member 'ended'"),
    "an error's code is gone": ("error codes", "lease-ended", None),
    "a metric is gone": ("kvxfer_transfer_bytes (metric)", "", None),
    "a metric has another label": ("kvxfer_transfer_bytes (metric)", "is", "counter by agent, role"),
    "an engine's metric is gone": ("vllm:kvxfer_receipts (metric)", "", None),
    "a path is gone": ("POST /v1/transfers", "", None),
    "a parameter is gone": ("GET /v1/transfers", "context", None),
    "a field of an answer is gone": ("Transfer (JSON)", "state", None),
    "a field more has to be sent": ("TransferRequest (JSON)", "more", "required"),
    "a command's option is gone": ("kvxfer serve (command)", "--pool-gib", None),
    "a setting of the connectors is gone": ("settings of the connectors", "lease_ttl_s", None),
    "a protocol is not spoken": ("protocol between agents", "6", None),
}
FREE: dict[str, tuple[str, str, str | None]] = {
    "another name": ("kvxfer.Other", "is", "class"),
    "another argument": ("kvxfer.Agent.read", "more", "by name, None by default"),
    "an argument may be left out": ("kvxfer.Agent.connect", "to", "argument 1, None by default"),
    "a field of an answer": ("Transfer (JSON)", "more", "field"),
    "a field may be left out": ("TransferRequest (JSON)", "region", "field"),
    "a newer protocol": ("protocol between agents", "7", "spoken"),
}


def changed(interface: Interface, name: str, part: str, value: str | None) -> Interface:
    after = {each: dict(parts) for each, parts in interface.items()}
    if not part:
        del after[name]
    elif value is None:
        del after[name][part]
    else:
        after.setdefault(name, {})[part] = value
    return after


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_what_breaks_others_is_found(recorded: dict[str, Any], change: tuple[str, str, str | None]) -> None:
    ((name, _),) = breaks(recorded["interface"], changed(recorded["interface"], *change))
    assert name == change[0]


@pytest.mark.parametrize("change", FREE.values(), ids=FREE)
def test_additions_are_free(recorded: dict[str, Any], change: tuple[str, str, str | None]) -> None:
    assert list(breaks(recorded["interface"], changed(recorded["interface"], *change))) == []


@pytest.mark.parametrize(
    ("old", "new", "may"),
    [
        ("0.2.0", "0.2.1", False),
        ("0.2.9", "0.3.0", True),
        ("0.9.0", "1.0.0", True),
        ("1.2.0", "1.3.0", False),
        ("1.2.0", "2.0.0", True),
    ],
)
def test_a_break_takes_a_version_and_a_line_of_the_changelog(old: str, new: str, may: bool) -> None:
    assert may_break(old, new) == may
    before: Interface = {"kvxfer.use_huge_pages": {"is": "function"}}
    release = {"version": old, "interface": before}
    assert bool(violations(release, {}, new, "`use_huge_pages` is gone: pools have `huge_pages`.")) != may
    assert violations(release, {}, new, "Nothing to see.") != []
    assert violations(release, before, old, "") == []
