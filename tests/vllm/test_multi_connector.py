"""KvxferConnector as a child of vLLM's MultiConnector, beside one that keeps caches in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.utils.network_utils import get_open_port

from kvxfer.connectors.vllm.metadata import RankMetadata, StepMetadata
from tests.vllm.stepping import (
    BLOCK_SIZE,
    HEAD_SIZE,
    KVXFER,
    NUM_BLOCKS,
    NUM_HEADS,
    TO_PREFILL,
    Answers,
    Engine,
    caches,
    config,
    request,
)
from tests.vllm.test_scheduler import PROMPT, from_prefill

ROLE = "kv_both"


def children(folder: Path, kvxfer_at: int) -> dict[str, Any]:
    files = {
        "kv_connector": "ExampleConnector",
        "kv_role": ROLE,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    connectors: list[dict[str, Any]] = [files]
    connectors.insert(kvxfer_at, {**KVXFER, "kv_role": ROLE, "kv_connector_extra_config": {}})
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}


class MultiEngine(Engine):
    """The workers get the orders of every child; the tests look at those for kvxfer's."""

    def _tell(self, meta: Any, ended: set[str]) -> None:
        (ours,) = [each for each in meta.metadata if isinstance(each, StepMetadata)]
        super()._tell(ours.step, ended)


@pytest.fixture(params=[0, 1], ids=["kvxfer first", "kvxfer second"])
def engine(request: pytest.FixtureRequest, weights: Path, tmp_path: Path) -> MultiEngine:
    return MultiEngine(config(weights, ROLE, connector=children(tmp_path, request.param)), caches())


def test_prefill_behind_it_hands_over(engine: MultiEngine) -> None:
    engine.add(request(PROMPT, 1, TO_PREFILL, "a"))
    engine.step()
    assert engine.kept.keys() == {"a"}
    assert engine.told["a"]["remote_block_ids"] == [list(engine.kept["a"].tables[0])]
    assert engine.num_blocks_in_use == 3
    engine.settle()
    assert engine.num_blocks_in_use == 0


def test_decode_behind_it_fetches(engine: MultiEngine) -> None:
    engine.add(from_prefill(PROMPT, 3, "a"))
    engine.step()
    assert engine.fetching["a"].num_tokens == len(PROMPT)
    engine.step(Answers(received={"a"}))
    engine.run()
    assert engine.finished == {"a": "length"}
    engine.settle()
    assert engine.num_blocks_in_use == 0


def test_an_aborted_decode_behind_it_leaves_nothing(engine: MultiEngine) -> None:
    engine.add(from_prefill(PROMPT, 3, "a"), from_prefill(PROMPT[::-1], 3, "b"))
    engine.step()
    engine.abort("a")
    engine.step()
    assert engine.abandoned == {"a"}
    engine.settle()
    assert engine.num_blocks_in_use == 0
    assert engine.finished == {"b": "length"}


@pytest.fixture(scope="module")
def one_worker() -> Iterator[None]:
    """vLLM's own groups of processes, of this one alone."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("kvxfer_at", [0, 1])
def test_workers_tell_where_they_are_though_another_child_shook_hands_first(
    weights: Path,
    tmp_path: Path,
    one_worker: None,
    kvxfer_at: int,
) -> None:
    settings = config(weights, ROLE, connector=children(tmp_path, kvxfer_at))
    worker: Any = MultiConnector(settings, KVConnectorRole.WORKER, caches())
    shape = (NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    names = caches().kv_cache_groups[0].layer_names
    try:
        ours = worker.sub_connectors[kvxfer_at]
        ours.register_kv_caches({name: torch.zeros(shape) for name in names})
        # As if the parameters came from the other child: this one gets parameters that it cannot use.
        engine = MultiEngine(settings, caches(), has_ranks=False)
        engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
        told = worker.build_connector_worker_meta()
        engine.add(request(PROMPT, 1, TO_PREFILL, "before"))
        engine.step(Answers(told_by_workers=told))
        assert "before" not in engine.told  # it ended with the step that told
        assert worker.build_connector_worker_meta() is None
        engine.add(request(PROMPT[::-1], 1, TO_PREFILL, "after"))
        engine.step()
        (rank,) = engine.told["after"]["kvxfer"]["ranks"]
        metadata = ours.get_handshake_metadata()
        assert isinstance(metadata, RankMetadata)
        assert rank["address"] == metadata.rank.agent.address
        engine.settle()
        assert engine.num_blocks_in_use == 0
    finally:
        worker.shutdown()
