"""The package's face: few names, and an import that costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvxfer


def test_names_are_few_and_all_there() -> None:
    assert len(kvxfer.__all__) < 30
    assert sorted(kvxfer.__all__) == sorted(kvxfer._HOME)
    assert set(kvxfer.__all__) <= set(dir(kvxfer))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kvxfer.Nothing  # noqa: B018


def test_every_name_resolves() -> None:
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    for name in kvxfer.__all__:
        assert getattr(kvxfer, name).__name__ == name


def test_using_an_agent_loads_nothing_heavy() -> None:
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    script = (
        "import sys, numpy; before = set(sys.modules); import kvxfer; kvxfer.Agent; kvxfer.Pool\n"
        "print(sorted((set(sys.modules) - before) & {'asyncio', 'pydantic', 'ipaddress', "
        "'concurrent.futures', 'importlib.metadata', 'torch', 'kvxfer.testing', 'http'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if "_native" in done.stderr:
        pytest.skip("the native module is not built")
    assert done.stdout.strip() == "[]", done.stderr
