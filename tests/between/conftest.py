"""Engines of two kinds, in the environment that ``make test-sglang`` sets up: it has vLLM's libraries too.

Elsewhere there is nothing to collect here.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.bench.engines import tiny_models
from tests.between.process import EngineProcess

HERE = Path(__file__).parent
#: Tokens of a block of vLLM's engine: its CPU kernels know multiples of 32.
BLOCK_TOKENS = 32

if not all(map(importlib.util.find_spec, ("vllm", "sglang"))):
    collect_ignore_glob = ["test_*.py"]
else:
    # Warnings of vLLM and torch during their import are not about this project.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kvxfer.connectors.vllm.connector  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # Engines start within the first test that needs them; their warnings are not about this project.
            item.add_marker(pytest.mark.timeout(600), append=False)
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with grouped heads, in float32."""
    return tiny_models.save("llama", tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture(scope="session")
def prefill(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A vLLM engine with kvxfer's connector (`tests.between.vllm_prefill.Prefill`)."""
    log = tmp_path_factory.mktemp("prefill") / "log"
    with EngineProcess("tests.between.vllm_prefill", str(weights), str(BLOCK_TOKENS), log=log) as engine:
        yield engine


# Pages smaller than vLLM's blocks, like them, and larger.
@pytest.fixture(scope="session", params=[16, BLOCK_TOKENS, 64], ids=lambda tokens: f"pages of {tokens}")
def page_tokens(request: pytest.FixtureRequest) -> int:
    """Tokens of a page of SGLang's runner."""
    return int(request.param)


@pytest.fixture(scope="session")
def decode(
    weights: Path, page_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """SGLang's model runner over its own pool (`tests.between.sglang_decode.Decode`)."""
    folder = tmp_path_factory.mktemp("decode")
    arguments = str(weights), str(page_tokens), str(folder)
    with EngineProcess(
        "tests.between.sglang_decode", *arguments, log=folder / "log", forked="tests.sglang.forked"
    ) as engine:
        yield engine
