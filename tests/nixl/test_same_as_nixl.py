"""Compares kvxfer's facade with NIXL 1.5.1: its names, and random programs of calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.connectors import nixl as facade
from kvxfer.connectors.nixl import _api, _bindings, _utils, logging
from tests.nixl import calls

NAMES = """
import inspect, json, sys
import nixl
parts = ("_api", "_bindings", "_utils", "logging")
_api, _bindings, _utils, logging = (sys.modules["nixl." + part] for part in parts)
def number(n):
    is_named = n.isupper() and n[:4] in ("NIXL", "DRAM", "VRAM", "FILE")
    return is_named and not isinstance(getattr(_bindings, n), str)
def names(thing): return sorted(n for n in vars(thing) if not n.startswith("_"))
def parameters(function):
    try: return [p.name for p in inspect.signature(function).parameters.values()]
    except ValueError: return None
print(json.dumps({
  "_api": names(_api), "_bindings": names(_bindings), "_utils": names(_utils), "logging": names(logging),
  "nixl_agent": {n: parameters(getattr(_api.nixl_agent, n)) for n in names(_api.nixl_agent)},
  "config": parameters(_api.nixl_agent_config.__init__),
  "nixlAgent": names(_bindings.nixlAgent), "nixlXferDList": names(_bindings.nixlXferDList),
  "nixlRegDList": names(_bindings.nixlRegDList), "nixlRemoteDList": names(_bindings.nixlRemoteDList),
  "nixlXferTelemetry": names(_bindings.nixlXferTelemetry),
  "numbers": {n: int(getattr(_bindings, n)) for n in names(_bindings) if number(n)},
}))
"""
# What a module imports for itself.
IMPORTED = {
    "np",
    "pickle",
    "sys",
    "Enum",
    "TYPE_CHECKING",
    "Optional",
    "Union",
    "annotations",
    "nixlBind",
    "logger",
    "os",
    "logging",
}
IMPORTED |= {"LOGGING_CONFIG"}  # configures all of the program's loggers; a library should not


def test_every_public_name_is_there(real_nixl: Callable[..., str]) -> None:
    found = json.loads(real_nixl("-c", NAMES))
    ours: dict[str, Any] = {"_api": _api, "_bindings": _bindings, "_utils": _utils, "logging": logging}
    for part, module in ours.items():
        assert set(found[part]) - IMPORTED <= set(dir(module)), part
    for kind in ("nixlAgent", "nixlXferDList", "nixlRegDList", "nixlRemoteDList"):
        assert set(found[kind]) <= set(dir(getattr(_bindings, kind))), kind
    assert set(found["nixlXferTelemetry"]) <= set(vars(_bindings.nixlXferTelemetry()))
    for name, parameters in found["nixl_agent"].items():
        assert list(inspect.signature(getattr(_api.nixl_agent, name)).parameters) == parameters, name
    assert list(inspect.signature(_api.nixl_agent_config.__init__).parameters) == found["config"]
    assert {name: int(getattr(_bindings, name)) for name in found["numbers"]} == found["numbers"]


SCRIPT = str(Path(calls.__file__).relative_to(Path(__file__).parents[2]))


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_programs_do_the_same(first: int, real_nixl: Callable[..., str], seed: int) -> None:
    first += 1000 * seed
    # NIXL's log goes where its results go.
    theirs = [
        json.loads(line)
        for line in real_nixl(SCRIPT, str(first), str(first + 10)).splitlines()
        if line.startswith("[[")
    ]
    assert theirs
    for number, expected in enumerate(theirs, first):
        ours = calls.run(facade, number)
        if ours != expected and "hangs" in json.dumps(expected):  # a transfer of NIXL's own
            expected = json.loads(real_nixl(SCRIPT, str(number), str(number + 1)).splitlines()[-1])
        assert ours == expected, f"seed {number}"
