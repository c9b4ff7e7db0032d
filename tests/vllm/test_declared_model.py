"""Properties of models that must be equal at two engines, as each declares them from its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ResolvedRevision

from kvxfer.bench.engines import tiny_models
from kvxfer.connectors.vllm.cache_tensors import ModelCache
from tests.vllm.stepping import NUM_BLOCKS, config


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("declared") / "model")


def declared(weights: Path, revision: str | None, name: str = "") -> str:
    made = config(weights, "kv_both")
    made.model_config.revision = revision
    return ModelCache.of(made, NUM_BLOCKS, name).model


def test_a_model_is_declared_with_the_commit_that_the_hub_told(weights: Path) -> None:
    local = declared(weights, None)
    assert local.startswith("LlamaForCausalLM/num_hidden_layers 4/")
    assert "revision" not in local
    assert declared(weights, "v2") == f"{local}/revision v2"
    # A branch moves on between the starts of two engines.
    commits = [ResolvedRevision(each * 40, initial="main", repo_id="org/model") for each in "ab"]
    assert [declared(weights, each) for each in commits] == [f"{local}/revision {each * 40}" for each in "ab"]


def test_the_users_name_stands_for_all(weights: Path) -> None:
    assert declared(weights, "v2", "ours") == "ours"
