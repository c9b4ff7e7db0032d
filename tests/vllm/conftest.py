"""Real vLLM engines on the CPU, in the environment that ``make test-vllm`` sets up.

Elsewhere there is nothing to collect here.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import fork_server
from tests.vllm import forked as vllm_forked
from tests.vllm import tiny_models
from tests.vllm.engine import Engines, server, start_engines

if TYPE_CHECKING:
    from tests.vllm.stepping import Make

HERE = Path(__file__).parent

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Warnings of vLLM and torch during their import are not about this project.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kvxfer.connectors.vllm.connector  # noqa: F401

#: These tests take seconds and run before those with engines, so that errors here show first.
WITHOUT_ENGINES = (
    *("test_cache_orders", "test_declared_model", "test_engine_interface", "test_kept_requests"),
    *("test_layer_shapes", "test_metrics", "test_multi_connector", "test_request"),
    *("test_sample_steps", "test_scheduler", "test_state_parts", "test_untransferred"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # Engines start within the first test that needs them, on machines of any speed; vLLM's own
            # warnings are not about this project.
            item.add_marker(pytest.mark.timeout(600), append=False)
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)
    items.sort(key=lambda item: item.path.stem not in WITHOUT_ENGINES and HERE in item.path.parents)


@pytest.fixture(scope="session", autouse=True)
def forks(request: pytest.FixtureRequest) -> None:
    """The process from which engines are forked imports vLLM while tests without engines run."""
    if any(item.path.stem not in WITHOUT_ENGINES for item in request.session.items):
        fork_server.start(vllm_forked.__name__)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The engines of a small Llama with grouped heads: alone, and as a pair with a router."""
    folder = tmp_path_factory.mktemp("engines")
    with server("alone", tiny_models.save("llama", folder / "model"), folder) as alone:
        # Prefill gives back the blocks of refused requests while the tests run, and a decode that waits for a
        # prefill that was never asked gives up.
        settings: dict[str, Any] = {"lease_ttl_s": 10.0, "push_timeout_s": 10.0}
        with start_engines("llama", folder, alone, **settings) as engines:
            alone.wait_ready()
            yield engines


# ---- schedulers without engines: tests/vllm/stepping.py, which needs vLLM --------------------------


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama; only its configuration is read."""
    return tiny_models.save("llama", tmp_path_factory.mktemp("stepped") / "model")


@pytest.fixture
def make(weights: Path) -> Make:
    """Makes schedulers of a role."""
    from tests.vllm.stepping import NUM_BLOCKS, Engine, caches, config

    def make(
        role: str = "kv_both", num_blocks: int = NUM_BLOCKS, num_groups: int = 1, **options: Any
    ) -> Engine:
        has_ranks = options.pop("has_ranks", True)
        return Engine(
            config(weights, role, num_groups=num_groups, **options),
            caches(num_groups, num_blocks),
            has_ranks=has_ranks,
        )

    return make


@pytest.fixture(params=[False, True], ids=["one at a time", "overlapping"])
def overlapping(request: pytest.FixtureRequest) -> bool:
    """Whether a step is scheduled before the last one's tokens are known."""
    return bool(request.param)
