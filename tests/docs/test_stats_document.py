"""docs/stats.md explains each key of a running agent's stats, and each budget with its limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

import kvxfer

DOCUMENT = (Path(__file__).parents[2] / "docs/stats.md").read_text()
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "TiB": 2**40}


def keys(heading: str) -> list[str]:
    """Returns the first cells of the rows of a section's table."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert section is not None, heading
    return re.findall(r"^\| `([\w ]+)` \|", section[1], re.MULTILINE)


@pytest.fixture
def stats() -> kvxfer.AgentStats:
    with kvxfer.Agent("prefill") as prefill, kvxfer.Agent("decode") as decode:
        prefill.connect_blocking(decode.address, 10)
        return prefill.stats()


def test_each_key_is_explained_once(stats: kvxfer.AgentStats) -> None:
    told = keys("`agent.stats()`")
    assert sorted(told) == sorted(stats)
    assert len(told) == len(set(told))


def test_each_key_of_a_peer_and_of_its_budget_is_explained(stats: kvxfer.AgentStats) -> None:
    (peer,) = stats["peers"]
    assert sorted(keys("A row of `peers`")) == sorted(peer)
    assert sorted(keys("Budgets")) == sorted(peer["budget"])
    assert set(stats["strangers"]) <= set(peer["budget"])


def test_limits_are_those_of_an_agent(stats: kvxfer.AgentStats) -> None:
    (peer,) = stats["peers"]
    for resource, (_, limit) in peer["budget"].items():
        told = re.search(rf"^\| `{resource}` \| .* \| ([\d,]+)(?: (\w+))?", DOCUMENT, re.MULTILINE)
        assert told is not None, resource
        assert int(told[1].replace(",", "")) * UNITS[told[2] or ""] == limit, resource
