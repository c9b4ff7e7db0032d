"""The package's face: few names, and an import that costs next to nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer


def test_names_are_few_and_all_there() -> None:
    assert len(kvxfer.__all__) <= 34
    assert sorted(kvxfer.__all__) == sorted(kvxfer._HOME)
    assert set(kvxfer.__all__) <= set(dir(kvxfer))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kvxfer.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_every_name_resolves() -> None:
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    for name in kvxfer.__all__:
        assert getattr(kvxfer, name).__name__ == name


def test_modules_that_have_names_of_their_own_need_no_import() -> None:
    script = (
        "import kvxfer; print(kvxfer.gpu.include_path, kvxfer.plan.footprint, kvxfer.engine_layouts.vllm)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "function vllm" in done.stdout, done.stderr
    assert set(kvxfer._MODULES) <= set(dir(kvxfer))
    assert not set(kvxfer._MODULES) & set(kvxfer.__all__)


def test_a_source_tree_that_was_not_built_says_so(tmp_path: Path) -> None:
    source = Path(kvxfer.__file__).parent
    shutil.copytree(source, tmp_path / "kvxfer", ignore=shutil.ignore_patterns("*.so", "bench", "connectors"))
    # The case of a user in a fresh clone who has kvxfer installed elsewhere.
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kvxfer; kvxfer.Agent"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}; {script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ModuleNotFoundError: {tmp_path / 'kvxfer'} is a source tree in which kvxfer was not"
    )
    assert "pip install --editable ." in last


def test_using_an_agent_loads_nothing_heavy() -> None:
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    script = (
        "import sys, numpy; before = set(sys.modules); import kvxfer; kvxfer.Agent; kvxfer.Pool\n"
        "print(sorted((set(sys.modules) - before) & {'asyncio', 'pydantic', 'ipaddress', "
        "'concurrent.futures', 'importlib.metadata', 'torch', 'kvxfer.testing', 'http'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
