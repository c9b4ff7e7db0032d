"""Real vLLM engines on the CPU, in the environment that ``make test-vllm`` sets up.

Elsewhere there is nothing to collect here.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.early_start import EarlyStart, started
from tests.vllm.engine import start_engines

HERE = Path(__file__).parent

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # What vLLM and torch warn of while they are imported is not ours to answer.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kvxfer.connectors.vllm.connector  # noqa: F401

#: They take seconds, and an engine that starts takes half a minute: what is broken here fails first.
WITHOUT_ENGINES = (
    *("test_engine_interface", "test_held_back", "test_layer_shapes", "test_multi_connector"),
    "test_push_workers",
    *("test_sample_steps", "test_scheduler", "test_state_parts", "test_statistics", "test_worker"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # Three engines start within the first test that asks for them; vLLM's own warnings are
            # not ours to answer.
            item.add_marker(pytest.mark.timeout(600), append=False)
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)
    items.sort(key=lambda item: item.path.stem not in WITHOUT_ENGINES and HERE in item.path.parents)


engines = started("engines", start_engines, scope="session")


@pytest.fixture(scope="session", autouse=True)
def early_start(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EarlyStart]:
    """The first engines start beside the tests that need none."""
    early = EarlyStart(request.session.items, tmp_path_factory)
    early.begin_next()
    yield early
    early.close()
