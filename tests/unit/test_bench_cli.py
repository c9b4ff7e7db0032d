import importlib.util
from typing import Any

import pytest

from kvxfer import cli


def test_missing_extra_says_which_command_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without_typer(name: str, *rest: Any) -> Any:
        return None if name == "typer" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_typer)
    assert cli.main(["bench", "pages"]) == 2
    assert "needs typer: pip install 'kvxfer[cli]'" in capsys.readouterr().err


def test_unknown_model_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    assert cli.main(["bench", "handover", "--model", "GPT-2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvxfer: unknown model 'GPT-2'; known are Llama-3.1-8B")
    assert error.count("\n") == 1


def test_unknown_option_is_status_2() -> None:
    pytest.importorskip("typer")
    assert cli.main(["bench", "pages", "--speed", "9"]) == 2


def test_help_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    assert cli.main(["bench", "handover", "--help"]) == 0
    assert "--corrupt" not in capsys.readouterr().out
