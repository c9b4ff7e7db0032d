"""All of deploy/compose as processes, with engines and a router: `make cluster`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvxfer.bench.cluster import hosts
from tests.system_program import system_program

# Two engines, that start on two busy cores.
BOUND_S = 400.0


def test_prompts_cross_the_cable_and_one_is_followed_through_all_of_it() -> None:
    if reason := hosts.missing():
        pytest.skip(f"no cluster here: {reason}")
    programs = {"etcd": "etcd-server", "prometheus": "prometheus"}
    options = [f"--{name}={system_program(package, name)}" for name, package in programs.items()]
    command = [sys.executable, "-m", "kvxfer.bench", "cluster", "--once", "--prompts=2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert said.count("crossed the cable: the tokens of one engine") == 2
    way = said.partition("$ kvxfer trace")[2].partition("Prometheus has")[0]
    # In the order in which it happened: router, prefill, the transfer's two ends; decode ends last.
    places = [
        way.index(words) for words in ("POST /v1/completions", "llm_request", "takes pages from prefill")
    ]
    assert places == sorted(places)
    assert len(re.findall(r"(?:prefill|decode) +llm_request", way)) == 2
    assert "Prometheus has count(kvxfer_daemon_ready == 1) = 2" in said
