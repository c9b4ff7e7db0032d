"""doctor: what it tries on the machine that it runs on, and what it makes of the answers."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvxfer.doctor import (
    available_transports,
    foreign,
    libraries,
    memory_limits,
    pages,
    report,
    trial,
)
from kvxfer.doctor.finding import Finding, State
from kvxfer.errors import UsageError
from kvxfer.log import logger
from kvxfer.session.transport_registry import kinds

pytest.importorskip("kvxfer._native", reason="the native module is not built")

ROOT = Path("/")


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200, check=False
    )


# ---- transports ---------------------------------------------------------------------------------


# Only of one process.
TRANSPORTS = tuple(kinds())
TRIED = tuple(kind.name for kind in kinds().values() if not kind.needs_gpu and not kind.why_off)
OFF = tuple(kind.name for kind in kinds().values() if not kind.needs_gpu and kind.why_off)


@pytest.mark.parametrize("name", TRIED)
def test_written_transports_are_tried_and_work(name: str) -> None:
    assert trial.try_transport(name) == ""
    assert "every byte checked" in by_name(available_transports.examine(ROOT))[name].found


@pytest.mark.parametrize("name", OFF)
def test_what_this_machine_lacks_blocks_only_who_asked_for_it(name: str) -> None:
    for required, state in (((), State.NOTE), ((name,), State.BLOCKS)):
        found = by_name(available_transports.examine(ROOT, required))[name]
        assert found.state is state
        assert kinds()[name].why_off in found.found
        assert found.change == kinds()[name].remedy


def test_a_transport_that_fails_limits_or_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_tcp(name: str) -> str:
        return "no route" if name == "tcp" else ""

    monkeypatch.setattr(trial, "try_transport", without_tcp)
    assert by_name(available_transports.examine(ROOT))["tcp"].state is State.LIMITS
    tcp = by_name(available_transports.examine(ROOT, ("tcp",)))["tcp"]
    assert tcp.state is State.BLOCKS
    assert "no route" in tcp.found
    assert tcp.change


def test_what_the_agents_of_a_trial_log_does_not_stand_before_the_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loud(name: str) -> str:
        logger().warning("kvxfer: %s: rail 0 went down", "doctor-src")
        logger().warning("kvxfer: %s: rail 0 went down", "decode-0")
        raise OSError("no route")

    monkeypatch.setattr(trial, "_move", loud)
    assert trial.try_transport("tcp") == "no route"
    logger().warning("kvxfer: doctor-src: after the trial")
    assert [record.getMessage() for record in caplog.records] == [
        "kvxfer: decode-0: rail 0 went down",
        "kvxfer: doctor-src: after the trial",
    ]


@pytest.mark.parametrize("num_files", [3, 8, 14])
def test_a_process_that_may_open_few_files_is_told_that_nothing_works(num_files: int) -> None:
    done = run_python(
        "import json, resource\n"
        "import kvxfer; kvxfer.Agent, kvxfer.Pool\n"  # modules are files, too: load them before
        "from kvxfer.doctor import report\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({num_files}, {num_files}))\n"
        "print(json.dumps(report.examine().to_dict()))"
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["ok"] is False
    findings = {(finding["subject"], finding["name"]): finding for finding in shown["findings"]}
    for name in TRIED:
        assert findings["transports", name]["state"] == "blocks"
        assert "does not work here" in findings["transports", name]["found"]


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    known = ", ".join(TRANSPORTS)
    with pytest.raises(UsageError, match=f"unknown transport 'nvlink'; known are {known}"):
        report.examine((TRIED[0], "nvlink"))


# ---- rights and memory --------------------------------------------------------------------------


def test_reading_an_undumpable_process_without_capabilities_is_seen_to_fail() -> None:
    # PR_CAPBSET_DROP of CAP_SYS_PTRACE holds from the next exec on; PR_SET_DUMPABLE after it.
    inner = (
        "import ctypes, json\n"
        "from pathlib import Path\n"
        "from kvxfer.doctor import foreign\n"
        "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
        "print(json.dumps([finding.to_dict() for finding in foreign.examine(Path('/'))]))"
    )
    done = run_python(
        "import ctypes, os, sys\n"
        "ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)\n"
        f"os.execv(sys.executable, [sys.executable, '-P', '-c', {inner!r}])"
    )
    assert done.returncode == 0, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert found["process_vm_readv"]["state"] == "limits"
    assert "EPERM" in found["process_vm_readv"]["found"]
    assert "CAP_SYS_PTRACE" in found["process_vm_readv"]["change"]
    assert found["this process"]["state"] == "limits"
    assert "not dumpable (0), has no CAP_SYS_PTRACE" in found["this process"]["found"]


def test_without_a_child_the_right_is_unknown_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    finding = foreign.readv()
    assert finding.state is State.NOTE
    assert "not tried" in finding.found


def test_seals_are_set_and_seen_to_hold() -> None:
    finding = memory_limits.seals()
    assert finding.state is State.GOOD, finding.found
    assert "F_SEAL_FUTURE_WRITE" in finding.found


def test_a_kernel_without_the_seal_of_writing_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    # A seal that no kernel knows is refused as that one is by kernels before 5.1.
    monkeypatch.setattr(memory_limits, "_F_SEAL_FUTURE_WRITE", 1 << 30)
    finding = memory_limits.seals()
    assert finding.state is State.LIMITS
    assert "could map a pool writable" in finding.found


def test_a_seal_that_does_not_hold_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_F_SEAL_FUTURE_WRITE", 0)
    assert "does not prevent a writable mapping" in memory_limits.seals().found


# ---- libraries ----------------------------------------------------------------------------------


def test_a_library_that_is_here_tells_its_file_and_version() -> None:
    def version(handle: ctypes.CDLL) -> str:
        tell = handle.gnu_get_libc_version
        tell.restype = ctypes.c_char_p
        return bytes(tell()).decode()

    found = libraries.load("libc.so.6", version)
    assert found.loaded
    assert found.version[0].isdecimal()
    assert Path(found.path).name.startswith("libc.so")
    assert libraries.load("libc.so.6", lambda handle: str(handle.no_such_call())).loaded


# ---- pages and peers ----------------------------------------------------------------------------


def test_every_wrong_byte_of_the_pages_is_found(seed: int) -> None:
    served = np.empty((pages.NUM_PAGES, pages.PAGE_NBYTES), np.uint8)
    pages.fill(served)
    random = np.random.default_rng(seed)
    src, dst = (random.permutation(pages.NUM_PAGES).astype(np.uint32) for _ in range(2))
    copy = np.empty_like(served)
    copy[dst] = served[src]
    assert pages.count_wrong(copy, src, dst) == 0
    copy[dst[5], -1] ^= 1
    copy[dst[-1], 0] ^= 128
    assert pages.count_wrong(copy, src, dst) == 2
    copy[dst[7]] = served[src[8]]
    assert pages.count_wrong(copy, src, dst) == 3
