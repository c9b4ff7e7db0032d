"""kvxfer as a backend of NIXL's own agent: libplugin_KVXFER.so, loaded by the installed NIXL 1.5.1."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.connectors import nixl as facade
from kvxfer.connectors.nixl import plugin_folder
from tests.nixl import calls

ROOT = Path(__file__).parents[2]


@pytest.mark.smoke
def test_every_call_of_an_engine(real_nixl: Callable[..., str]) -> None:
    printed = real_nixl("tests/nixl/plugin_driver.py", "KVXFER", NIXL_PLUGIN_DIR=str(plugin_folder()))
    said = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert said == {
        "plugins": True,
        "mem_types": ["DRAM_SEG"],
        "params": ["advertise", "listen", "timeout_s", "transports"],
        "names": ["far", "near"],
        "connects": None,
        "backend of WRITE": "KVXFER",
        "WRITE": ["DONE", True],
        "bytes of WRITE": True,
        "backend of READ": "KVXFER",
        "READ": ["DONE", True],
        "bytes of READ": True,
        "notification": True,
        "within": ["DONE", True, True],
        "partial": "far",
        "outside": "nixlNotFoundError",
        "deregistered": "nixlNotFoundError",
        "cost": "nixlNotSupportedError",
        "query": "nixlNotSupportedError",
        "removed": "nixlNotFoundError",
    }


def test_random_programs_do_the_same_as_on_the_facade(real_nixl: Callable[..., str], seed: int) -> None:
    first = 1000 * seed
    script = str(Path(calls.__file__).relative_to(ROOT))
    printed = real_nixl(script, str(first), str(first + 20), "KVXFER", NIXL_PLUGIN_DIR=str(plugin_folder()))
    theirs = [json.loads(line) for line in printed.splitlines() if line.startswith("[[")]
    assert theirs
    for number, expected in enumerate(theirs, first):
        assert calls.run(facade, number, "KVXFER") == expected, f"seed {number}"
