"""errors: classes by the largest thing lost, and words that survive."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import pytest

from kvxfer import errors
from kvxfer.errors import (
    CODE_NAMES,
    AgentError,
    ExhaustedError,
    KvxferError,
    PeerError,
    RailError,
    TransferError,
    UsageError,
    class_of,
    from_code,
    translate,
)

STATUS_H = Path(__file__).parents[2] / "native/include/kvxfer/status.h"


def test_codes_are_those_of_status_h() -> None:
    text = STATUS_H.read_text()
    codes = re.findall(r"^\s+k(\w+) = (\d+),", text, re.MULTILINE)
    words = {int(number): re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower() for name, number in codes}
    assert words.pop(0) == "ok"
    assert words == CODE_NAMES


def test_codes_are_those_of_the_native_module() -> None:
    native = pytest.importorskip("kvxfer._native")
    if native.CODES:
        assert {number: name for name, number in native.CODES.items() if number} == CODE_NAMES


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (10, UsageError),
        (16, UsageError),
        (17, ExhaustedError),
        (30, TransferError),
        (36, TransferError),
        (50, RailError),
        (70, PeerError),
        (75, PeerError),
        (90, AgentError),
        (93, AgentError),
        (1, UsageError),
    ],
)
def test_classes_follow_the_groups(code: int, cls: type[KvxferError]) -> None:
    assert class_of(code) is cls
    error = from_code(code, "words")
    assert type(error) is cls
    assert error.code == CODE_NAMES[code]


def test_an_error_says_where() -> None:
    error = from_code(
        31, "lease 7 was revoked", peer="decode-0", rail="shm", failed_blocks=np.array([3], np.uint32)
    )
    assert str(error) == "lease 7 was revoked [lease-ended, peer decode-0, rail shm]"
    assert error.failed_blocks.tolist() == [3]
    assert from_code(30, "no").failed_blocks.tolist() == []


def test_an_error_survives_copying() -> None:
    # As a process pool of the engine sends it.
    error = copy.copy(from_code(70, "gone", peer="p", failed_blocks=np.array([1], np.uint32)))
    assert type(error) is PeerError
    assert str(error) == "gone [peer-lost, peer p]"
    assert error.failed_blocks.tolist() == [1]


def test_what_is_unknown_is_not_safe_to_retry() -> None:
    assert isinstance(translate(RuntimeError("odd")), AgentError)
    assert translate(Exception(31, "ended")).code == "lease-ended"
    assert isinstance(from_code(4711, ""), AgentError)
    assert issubclass(errors.ExhaustedError, UsageError)
