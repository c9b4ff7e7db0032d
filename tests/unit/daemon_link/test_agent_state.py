"""An agent's reports fit into frames, however large its state is, and contain no right."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer.daemon_link.agent_state import fitted, lease_id
from kvxfer.daemon_link.frames import json_frame

CLOCKS = {"monotonic_ns": 1, "unix_ns": 2}


def row(nbytes: int) -> dict[str, Any]:
    return {"notes": ["x" * nbytes]}


def test_nothing_is_told_of_nothing() -> None:
    assert list(fitted({})) == []


def test_what_fits_is_one_message() -> None:
    sections = {"stats": {"a": 1}, "peers": [row(9)], **CLOCKS}
    assert list(fitted(sections)) == [{"t": "state", **sections}]


def test_what_does_not_fit_is_told_by_sections_and_of_one_too_long_the_first_rows() -> None:
    peers, leases = [row(1000) for _ in range(800)], [row(1000) for _ in range(3000)]
    told = list(fitted({"stats": {"a": 1}, "peers": peers, "leases": leases, **CLOCKS}))
    found: dict[str, Any] = {}
    for message in told:
        json_frame(message)  # raises where it does not fit
        assert CLOCKS.items() <= message.items()
        found |= message
    assert found["stats"] == {"a": 1}
    assert found["peers"] == peers
    assert found["leases"] == leases[: len(found["leases"])] != []


@pytest.mark.parametrize("number", [1, 2**40, 2**62 + 12345])
def test_a_lease_is_named_without_what_opens_it(number: int) -> None:
    named = lease_id(number)
    assert named == lease_id(number) != lease_id(number + 1)
    assert (named == str(number)) == (number < 2**62)
