"""options: errors name the wrong option, and no agent listens beyond loopback without a secret."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvxfer.errors import UsageError
from kvxfer.options import AgentOptions

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVXFER_SECRET", raising=False)
    monkeypatch.delenv("KVXFER_SECRET_FILE", raising=False)


@pytest.mark.parametrize(
    "options",
    [
        {"transfer_timeout_s": 0},
        {"directory_ttl_s": 0},
        {"advertise": "10.0.0.7"},
        {"advertise": "tcp://10.0.0.7:x"},
        {"advertise": "tcp://user@10.0.0.7"},
        {"advertise": "tcp://0.0.0.0"},
        {"advertise": "tcp://[::]:7301"},
        {"advertise": "tcp://10.0.0.7:0"},
        {"advertise": "tcp://10.0.0.7", "listen": ""},
        {"listen": "tcp://127.0.0.1"},
        {"heartbeat_interval_s": 3.0},
        {"refuse_unlike": 1},
        {"require": "tcp"},
        {"require": ("smoke",)},
        {"require": ("tcp",), "transports": ("shm",)},
        {"transport_options": {"tcp.rails": 0}},
        {"transport_options": {"tcp.rails": 65}},
        {"transport_options": {"tcp.wheels": 2}},
        {"transport_options": {"smoke.rails": 2}},
        {"transport_options": {"rails": 2}},
        {"gpu": -1},
        {"gpu_ctas": 0},
        {"gpu_ctas": 70_000},
        {"staging_nbytes": -1},
        {"staging_nbytes": 4096},
        {"copy_engines": 1},
        {"daemon_may": "show"},
        {"daemon_may": ("show", "stop")},
        {"daemon_may": ([],)},
        {"spin_us": -1},
        {"copy_threads": 0},
        {"copy_threads": 65},
        {"transports": ()},
        {"transports": ("smoke",)},
        {"lease_margin_s": -1.0},
        {"max_transfers_per_peer": 0},
        {"eager_nbytes": 65_537},
        {"secret": "short"},
        {"listen": "7301"},
        {"listen": "udp://127.0.0.1:1"},
        {"listen": "tcp://127.0.0.1:99999"},
        {"transports": "tcp"},
        {"transport_options": {2: 2}},
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        AgentOptions(**options).to_native()
    assert caught.value.code == "invalid-argument"


@pytest.mark.parametrize(
    "listen", ["tcp://0.0.0.0:0", "tcp://10.0.0.7:7301", "tcp://[::]:0", "tcp://node-7:1"]
)
def test_beyond_loopback_needs_a_secret(listen: str) -> None:
    with pytest.raises(UsageError, match="without a secret"):
        AgentOptions(listen=listen).to_native()
    assert AgentOptions(listen=listen, secret=SECRET).to_native()["secret"] == SECRET.encode()


@pytest.mark.parametrize(
    "listen", ["", "tcp://127.0.0.1:0", "tcp://localhost:7301", "tcp://[::1]:0", "tcp://127.9.9.9:1"]
)
def test_loopback_needs_none(listen: str) -> None:
    assert AgentOptions(listen=listen).to_native()["secret"] == b""


@pytest.mark.parametrize(
    ("cpus", "threads"), [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (15, 3), (16, 4), (256, 4)]
)
def test_copy_threads_are_a_quarter_of_the_cpus(
    cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    assert AgentOptions().copy_threads == threads
    assert AgentOptions(copy_threads=3).to_native()["copy_threads"] == 3
