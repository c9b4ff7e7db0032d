"""Real SGLang engines on the CPU, in the environment that ``make test-sglang`` sets up.

Elsewhere there is nothing to collect here.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.bench.engines import tiny_models
from tests import fork_server
from tests.sglang import forked as sglang_forked
from tests.sglang.engine import Engines, Router, server, start_pair

HERE = Path(__file__).parent

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Warnings of SGLang and torch during their import are not about this project.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kvxfer.connectors.sglang.manager  # noqa: F401


def has_engines(item: pytest.Item) -> bool:
    """Whether a test starts engines; those run last, so that errors without engines show sooner."""
    return item.path.stem.endswith("_servers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # Engines start within the first test that needs them, on machines of any speed; SGLang's own
            # warnings are not about this project.
            item.add_marker(pytest.mark.timeout(600), append=False)
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)
    items.sort(key=lambda item: HERE in item.path.parents and has_engines(item))


@pytest.fixture(scope="session", autouse=True)
def forks(request: pytest.FixtureRequest) -> None:
    """The process from which engines are forked imports SGLang while tests without engines run."""
    if any(HERE in item.path.parents and has_engines(item) for item in request.session.items):
        fork_server.start(sglang_forked.__name__)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with grouped heads."""
    return tiny_models.save("llama", tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture(scope="session")
def engines(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Its engines: alone, and as a pair with SGLang's router."""
    folder = tmp_path_factory.mktemp("engines")
    with (
        server("alone", weights, folder) as alone,
        start_pair(weights, folder) as (prefill, decode),
        Router([prefill], [decode], folder / "router.log") as router,
    ):
        yield Engines(alone.wait_ready(), prefill, decode, router.wait_ready())
