"""The observer of `kvxfer bench serving` around the connectors of a real vLLM; no engine is started.

vLLM is imported within the tests: its imports warn, and only warnings of imports are allowed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvxfer.bench.serving import nixl as serving_nixl
from kvxfer.bench.serving import observer as serving_observer

no_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="`make bench-serving-setup` installs NIXL"
)


def check_can_be_made_by_the_engine(found: type[Any]) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
    from vllm.utils.func_utils import supports_kw

    assert issubclass(found, serving_observer._Observer)
    assert supports_hma(found)
    assert supports_kw(found, "kv_cache_config")


def test_engine_gets_the_connector_that_it_names_with_an_observer_before_it() -> None:
    from kvxfer.connectors.vllm import KvxferConnector

    found = serving_observer.KvxferConnector
    assert issubclass(found, KvxferConnector)
    assert found is serving_observer.KvxferConnector
    check_can_be_made_by_the_engine(found)


@no_nixl
def test_nixl_is_observed_by_the_same_lines() -> None:
    found = serving_nixl.NixlConnector
    assert found is serving_nixl.NixlConnector
    check_can_be_made_by_the_engine(found)


def test_every_method_that_is_timed_is_one_of_the_interface() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    known = (KVConnectorBase_V1, SupportsHMA)
    for name in serving_observer._METHODS:
        assert any(hasattr(one, name) for one in known), name


def test_connector_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="'NoSuchConnector' is not registered"):
        _ = serving_observer.NoSuchConnector
    with pytest.raises(AttributeError):
        _ = serving_observer.no_such_name
