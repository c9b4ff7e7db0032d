"""The check command for users with the engine, as far as it works without the engine."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.trtllm import fake_engine


@pytest.fixture
def engine() -> Iterator[ModuleType]:
    found = fake_engine.install("newer")
    manager = fake_engine.module("tensorrt_llm.bindings.internal.batch_manager")
    manager.LlmRequest = type(  # type: ignore[attr-defined]
        "LlmRequest",
        (),
        dict.fromkeys(("request_id", "prompt_len", "get_tokens", "context_current_position")),
    )
    yield found
    fake_engine.uninstall()


def check(*arguments: str) -> Any:
    return importlib.import_module("kvxfer.connectors.trtllm.engine_check").main(list(arguments))


def test_where_there_is_no_engine_it_says_so() -> None:
    command = [sys.executable, "-m", "kvxfer.connectors.trtllm", "MODEL"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "tensorrt_llm is not installed in this environment" in ended.stdout
    assert "nothing was checked" in ended.stdout


def test_it_prints_what_it_has_checked(engine: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check() == 0
    said = capsys.readouterr().out
    assert "KvxferConnectorWorker has all methods that KvCacheConnectorWorker requires" in said
    assert "LlmRequest has request_id, prompt_len, get_tokens, context_current_position" in said
    assert "not checked: whether two engines give the same tokens as one" in said
    assert "FAILED" not in said


def test_what_does_not_fit_fails_it(engine: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def start_load_kv(self: Any, stream: Any, priority: int) -> None: ...

    engine.KvCacheConnectorWorker = type(  # type: ignore[attr-defined]
        "KvCacheConnectorWorker", (), {"start_load_kv": start_load_kv}
    )
    del engine.KvCacheConnectorManager
    assert check("MODEL") == 1
    said = capsys.readouterr().out
    assert (
        "FAILED  its methods take the parameters of KvCacheConnectorWorker's: start_load_kv must take" in said
    )
    assert "FAILED  KvCacheConnectorManager has get_finished" in said
    # An engine that fails these checks is not started.
    assert "one engine alone" not in said
