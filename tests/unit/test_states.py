"""States are enums whose members are the words of native code, all of them and no others."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

import pytest

import kvxfer

pytest.importorskip("kvxfer._native", reason="the native module is not built")

NATIVE = Path(__file__).parents[2] / "native"


def words_in(file: str, function: str) -> set[str]:
    """The words of the table that a native function returns from."""
    body = (NATIVE / file).read_text().partition(function)[2]
    found = re.search(r"kNames(?:\[\])? = \{([^}]*)\}", body)
    assert found, f"{file} has no table behind {function}"
    return set(re.findall(r'"([^"]+)"', found[1]))


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (kvxfer.TransferState, words_in("bindings/transfer.cpp", "PyHandle::state")),
        # What became of leases that native code has forgotten is Python's to say.
        (kvxfer.LeaseState, words_in("core/lease.cpp", "name_of(LeaseState") | {"ended"}),
    ],
)
def test_states_are_the_words_of_native_code(states: type[StrEnum], words: set[str]) -> None:
    assert {str(state) for state in states} == words
    for word in words:
        assert states(word) == word


def test_a_lease_is_final_once_no_byte_moves_under_it() -> None:
    moving = {kvxfer.LeaseState.ACTIVE, kvxfer.LeaseState.ENDING}
    assert {state for state in kvxfer.LeaseState if not state.is_final} == moving
