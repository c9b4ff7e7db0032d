"""Checks the connector against TensorRT-LLM's classes as recorded from their source.

The engine is not installed here. `contracts/` records what its source promises, the fake engine is checked
against that, and the connector against both. `python -m kvxfer.connectors.trtllm` checks an installed engine.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvxfer.connectors.trtllm
from tests.engine_contract import describe, misfits
from tests.trtllm import fake_engine
from tests.trtllm.contract import RELEASES, interface

FOLDER = Path(kvxfer.connectors.trtllm.__file__).parent
BASES = {
    "KvxferConnectorWorker": "KvCacheConnectorWorker",
    "KvxferConnectorScheduler": "KvCacheConnectorScheduler",
}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Installs the fake engine."""
    monkeypatch.delenv("KVXFER_TRTLLM", raising=False)
    fake_engine.install(request.param)
    yield request.param
    fake_engine.uninstall()


def own(name: str) -> type:
    found: type = getattr(importlib.import_module("kvxfer.connectors.trtllm"), name)
    return found


def test_the_fake_engine_promises_what_was_written_down(release: str) -> None:
    classes = interface(release).classes
    assert classes.keys() == fake_engine.classes_of(release).keys()
    for name, cls in fake_engine.classes_of(release).items():
        members = describe(cls, with_private=name in BASES.values())
        kept = {
            each: what for each, what in members.items() if not each.startswith("__") or each == "__init__"
        }
        assert kept == classes[name], name


@pytest.mark.parametrize("name", BASES)
def test_every_release_can_make_and_call_the_connector(release: str, name: str) -> None:
    cls = own(name)
    base = interface(release).classes[BASES[name]] | interface(release).documented.get(BASES[name], {})
    given = {each: what for each, what in describe(cls, with_private=True).items() if each in vars(cls)}
    overrides = {each: what for each, what in given.items() if each in base and what != "attribute"}
    assert not misfits(overrides, base)
    assert not cls.__abstractmethods__  # type: ignore[attr-defined]
    assert {each for each, what in base.items() if what.startswith("abstract ")} <= given.keys()
    # Methods that the older release lacks are not needed there.
    assert overrides.keys() >= {each for each in base if each.endswith("_by_layer_group")}


def test_the_connector_is_found_by_the_engines_settings(release: str) -> None:
    # As `KvCacheConnectorConfig` names it.
    module = importlib.import_module("kvxfer.connectors.trtllm")
    for name in BASES:
        assert issubclass(getattr(module, name), fake_engine.classes_of(release)[BASES[name]])
    with pytest.raises(AttributeError):
        _ = module.KvxferConnector


def test_all_that_is_read_of_the_manager_and_of_requests_was_written_down(release: str) -> None:
    recomputing = importlib.import_module("kvxfer.connectors.trtllm.recomputing")
    llm_request = importlib.import_module("kvxfer.connectors.trtllm.llm_request")
    assert {recomputing.METHOD, *recomputing.FIELDS, "worker"} == set(interface(release).manager)
    tree = ast.parse((FOLDER / "llm_request.py").read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.own"
    }
    # Names that a release may lack are read with a default.
    assert read == set(llm_request.NEEDED) <= set(interface(release).request)
    assert {*llm_request.NEEDED, *llm_request.OPTIONAL} == set(interface("newer").request) | {"cache_salt_id"}


def test_without_the_engine_its_absence_is_said() -> None:
    fake_engine.uninstall()
    with pytest.raises(ModuleNotFoundError, match="was not found in tensorrt_llm"):
        _ = importlib.import_module("kvxfer.connectors.trtllm").KvxferConnectorWorker
    # The settings need no engine.
    assert importlib.import_module("kvxfer.connectors.trtllm.executor_settings").settings_of_environment()


# ---- what cannot be done is refused when the engine starts ------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2"),
    "context": ({"context_parallel_size": 2}, "context_parallel_size 2"),
    "attention data parallelism": ({"enable_attention_dp": True}, "enable_attention_dp"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_yet_is_refused_in_words(release: str, what: str) -> None:
    changes, words = REFUSED[what]
    with pytest.raises(NotImplementedError, match=words):
        own("KvxferConnectorWorker")(fake_engine.llm_args(**changes))


def test_a_manager_of_another_release_is_refused_unless_the_engine_may_stop(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine.install(release, manager=type("KvCacheConnectorManager", (), {}))
    with pytest.raises(NotImplementedError, match='"failed_loads": "stop"'):
        own("KvxferConnectorWorker")(fake_engine.llm_args())
    monkeypatch.setenv("KVXFER_TRTLLM", '{"failed_loads": "stop"}')
    assert own("KvxferConnectorWorker")(fake_engine.llm_args())


SETTINGS: dict[str, str] = {
    "[1]": "write an object",
    "{": "is not valid JSON",
    '{"rols": "prefill"}': "rols is not a setting",
    '{"role": "both ends"}': "role",
    '{"role": "decode"}': "name them in prefills",
    '{"role": "prefill", "prefills": ["tcp://127.0.0.1:1"]}': "does not ask other engines",
    '{"role": "decode", "prefills": ["nowhere"]}': "prefills",
    '{"role": "decode", "prefills": ["tcp://8.8.8.8:1"]}': "allowed_hosts",
    '{"lookup_timeout_s": 0}': "lookup_timeout_s",
    '{"lease_ttl_s": -1}': "lease_ttl_s",
    '{"mode": "push"}': "mode is not a setting",
}


@pytest.mark.parametrize("text", SETTINGS)
def test_settings_that_mean_nothing_are_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = importlib.import_module("kvxfer.connectors.trtllm.executor_settings")
    monkeypatch.setenv("KVXFER_TRTLLM", text)
    with pytest.raises(ValueError, match=SETTINGS[text]):
        settings.settings_of_environment()
