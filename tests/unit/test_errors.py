"""errors: classes by the largest thing lost, and words that survive."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import numpy as np

from kvxfer import errors
from kvxfer.errors import (
    CODE_NAMES,
    AgentError,
    ExhaustedError,
    PeerError,
    RailError,
    TransferError,
    UsageError,
    class_of,
    from_code,
    translate,
)
from kvxfer.transfer import Transfer

ROOT = Path(__file__).parents[2]
CLASSES = (UsageError, ExhaustedError, TransferError, RailError, PeerError, AgentError)


def test_what_python_raises_has_the_class_of_its_code_too() -> None:
    """Where the class is written beside the code, that ``except TransferError`` misses none."""
    classes = {name: class_of(number).__name__ for number, name in CODE_NAMES.items()}
    calls = [
        (path.relative_to(ROOT), call)
        for folder in ("kvxfer", "connectors")
        for path in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in {each.__name__ for each in CLASSES}
    ]
    assert len(calls) > 100
    for path, call in calls:
        for code in [each.value for each in call.keywords if each.arg == "code"]:
            if isinstance(code, ast.Constant):
                assert getattr(call.func, "id", "") == classes[str(code.value)], f"{path}:{call.lineno}"


def test_an_error_says_where() -> None:
    failed = np.array([3], np.uint32)
    error = from_code(
        31, "lease 7 was revoked", peer="decode-0", rail="shm", context="req-42", failed_blocks=failed
    )
    assert str(error) == "lease 7 was revoked [lease-ended, peer decode-0, rail shm, context req-42]"
    assert error.context == "req-42"
    assert str(from_code(34, "late", context="a\nb")) == "late [deadline, context 'a\\nb']"  # on one line
    assert error.failed_blocks.tolist() == [3]
    assert from_code(30, "no").failed_blocks.tolist() == []


def test_an_error_survives_copying() -> None:
    # As a process pool of the engine sends it.
    error = copy.copy(from_code(70, "gone", peer="p", context="r", failed_blocks=np.array([1], np.uint32)))
    assert type(error) is PeerError
    assert str(error) == "gone [peer-lost, peer p, context r]"
    assert error.failed_blocks.tolist() == [1]


def test_what_is_unknown_is_not_safe_to_retry() -> None:
    assert isinstance(translate(RuntimeError("odd")), AgentError)
    assert translate(Exception(31, "ended")).code == "lease-ended"
    assert isinstance(from_code(4711, ""), AgentError)
    assert issubclass(errors.ExhaustedError, UsageError)


def test_the_table_has_every_code_with_its_class_and_awaiting_raises_what_was_lost() -> None:
    lines = re.findall(r"^\| `.*\|$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    rows = [(code, cls, awaiting) for code, cls, _, awaiting, *_ in cells]
    numbers = {name: number for number, name in CODE_NAMES.items()}
    assert [name for name, _, _ in rows] == list(numbers)
    for name, cls, awaiting in rows:
        assert class_of(numbers[name]).__name__ == cls, name
        if awaiting == "yes":
            assert cls in {"TransferError", "PeerError", "AgentError"}, name
        else:
            assert cls != "TransferError", name
    # What __await__ names is what the table marks.
    named = re.findall(r"``([a-z-]+)``", Transfer.__await__.__doc__ or "")
    assert sorted(set(named) - {"failed_blocks"}) == sorted(name for name, _, yes in rows if yes == "yes")
