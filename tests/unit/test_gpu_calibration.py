"""Which way copies between a GPU and host memory go: measured once, kept, read, and shown."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import _native
from kvxfer.doctor import devices
from kvxfer.gpu import availability, calibration, cubin_cache, loading, sources
from kvxfer.gpu.calibration import Calibration, Choice
from kvxfer.gpu.driver import Device

DEVICE = Device(0, "NVIDIA H200", (9, 0), 141 << 30)
CUDA = 13, 0
# To the host engines are as fast from 64 KiB on, from the host never.
SAMPLES = (
    (0, 0, 16, 4096, 1000, 9000),
    (0, 0, 16, 65536, 1000, 1010),
    (0, 0, 16, 262144, 1000, 900),
    (0, 1, 8, 16384, 1000, 500),
    (1, 0, 16, 4096, 1000, 9000),
    (1, 0, 16, 65536, 1000, 1500),
)
LEAST = {(0, 0, 0): 65536, (0, 1, 1): 16384}

Measured = list[int]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of calibrations that is not there yet, and a GPU that can be measured."""
    monkeypatch.setenv("KVXFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(availability, "check", lambda index: (DEVICE, CUDA))
    monkeypatch.setattr(loading, "shared", lambda index: (None, None, None))
    calibration._shared.cache_clear()
    return tmp_path / "cache" / "calibrations"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measured]:
    """Has a measurement give samples or raise; returns a list of the devices that were measured."""

    def prepare(samples: Any = SAMPLES, error: tuple[str, str] | None = None) -> Measured:
        measured: Measured = []

        def gpu_calibrate(device: int, kernels: tuple[int, int, int]) -> list[Any]:
            measured.append(device)
            if error is not None:
                raise _native.NativeError(*error)
            return list(samples)

        monkeypatch.setattr(_native, "gpu_calibrate", gpu_calibrate)
        return measured

    return prepare


def anew() -> Calibration:
    """As another process would have it."""
    calibration._shared.cache_clear()
    return calibration.shared(0)


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("*.json")
    return file


def test_it_is_measured_once_and_then_read(folder: Path, measure: Callable[..., Measured]) -> None:
    measured = measure()
    assert calibration.look(DEVICE, CUDA) is None
    assert not folder.exists()
    assert calibration.shared(0) == Calibration(SAMPLES)
    assert calibration.shared(0) == anew() == calibration.look(DEVICE, CUDA) == Calibration(SAMPLES)
    assert measured == [0]
    assert folder.stat().st_mode & 0o077 == 0
    assert only_file(folder).stat().st_mode & 0o077 == 0


def test_it_is_of_one_gpu_one_driver_and_these_kernels(
    folder: Path, measure: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure()
    calibration.shared(0)
    assert calibration.look(replace(DEVICE, name="NVIDIA H100 PCIe"), CUDA) is None
    assert calibration.look(replace(DEVICE, capability=(10, 0)), CUDA) is None
    assert calibration.look(DEVICE, (12, 9)) is None
    assert calibration.look(replace(DEVICE, index=3), CUDA) is not None  # one of several alike
    monkeypatch.setattr(sources, "key_of", lambda *_: "of other sources")
    assert calibration.look(DEVICE, CUDA) is None


def test_a_file_that_is_damaged_anywhere_is_measured_anew(
    folder: Path, measure: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measure()
    calibration.shared(0)
    file = only_file(folder)
    # Its name is made of every kernel's sources, which takes longer than all the rest.
    monkeypatch.setattr(calibration, "_path_of", lambda *_: file)
    whole = file.read_bytes()
    for nbytes in range(len(whole)):
        file.write_bytes(whole[:nbytes])
        assert calibration.look(DEVICE, CUDA) is None, nbytes
    for index in range(len(whole)):
        file.write_bytes(whole[:index] + bytes([whole[index] ^ 0x11]) + whole[index + 1 :])
        assert calibration.look(DEVICE, CUDA) is None, index
    assert anew() == Calibration(SAMPLES)
    assert measured == [0, 0]
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    "rows",
    [
        "null",
        "[[0, 0, 16, 65536, 1000]]",
        "[[0, 0, 16, 65536, 1000, 0]]",
        "[[2, 0, 16, 65536, 1000, 1000]]",
        "[[0, 2, 16, 65536, 1000, 1000]]",
        "[[0, 0, 0, 65536, 1000, 1000]]",
        "[[0, 0, 16, -1, 1000, 1000]]",
        "[[0, 0, 16, 1e999, 1000, 1000]]",
        f"[{', '.join(['[0, 0, 16, 65536, 1000, 1000]'] * 257)}]",
        "[" * 9999,
    ],
)
def test_what_is_no_calibration_is_not_taken_for_one(
    folder: Path, measure: Callable[..., Measured], rows: str
) -> None:
    import zlib

    measure()
    calibration.shared(0)
    body = rows.encode()
    only_file(folder).write_bytes(b"%08x\n%s" % (zlib.crc32(body), body))
    assert calibration.look(DEVICE, CUDA) is None


def test_of_another_user_s_file_nothing_is_taken(
    folder: Path, measure: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure()
    calibration.shared(0)
    if os.geteuid() == 0:
        os.chown(only_file(folder), 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert calibration.look(DEVICE, CUDA) is None


def test_without_a_folder_it_is_kept_in_memory(
    tmp_path: Path,
    folder: Path,
    measure: Callable[..., Measured],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    measured = measure()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVXFER_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, "kvxfer"):
        assert calibration.shared(0) == calibration.shared(0) == Calibration(SAMPLES)
    assert measured == [0]
    assert "KVXFER_CACHE_DIR" in caplog.text
    monkeypatch.delenv("KVXFER_CACHE_DIR")
    monkeypatch.setattr(cubin_cache, "base", lambda: None)
    assert anew() == Calibration(SAMPLES)
    assert measured == [0, 0]


@pytest.mark.parametrize(("code", "kept"), [("unsupported", True), ("system", False)])
def test_where_nothing_can_be_measured_copies_go_by_kernels(
    folder: Path, measure: Callable[..., Measured], caplog: pytest.LogCaptureFixture, code: str, kept: bool
) -> None:
    measured = measure(error=(code, "in these words"))
    with caplog.at_level(logging.INFO, "kvxfer"):
        assert calibration.shared(0) == Calibration()
    assert "in these words" in caplog.text
    assert anew() == Calibration()
    # What passes is tried again by the next process.
    assert measured == ([0] if kept else [0, 0])


def test_a_measurement_that_had_no_time_is_not_kept(folder: Path, measure: Callable[..., Measured]) -> None:
    measured = measure(samples=())
    assert calibration.shared(0) == anew() == Calibration()
    assert measured == [0, 0]


def test_of_two_processes_one_measures(
    folder: Path, measure: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measure()
    monkeypatch.setattr(calibration, "_LOCK_S", 60.0)
    calibration.shared(0)
    file = only_file(folder)
    whole = file.read_bytes()
    file.unlink()
    calibration._shared.cache_clear()
    with file.with_suffix(".lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # the other one is at it
        found: list[Calibration] = []
        second = threading.Thread(target=lambda: found.append(calibration.shared(0)))
        second.start()
        file.write_bytes(whole)
    second.join(60)
    assert found == [Calibration(SAMPLES)]
    assert measured == [0]


def test_a_process_that_stands_still_while_it_measures_holds_up_nobody(
    folder: Path, measure: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measure()
    calibration.shared(0)
    file = only_file(folder)
    file.unlink()
    monkeypatch.setattr(calibration, "_LOCK_S", 0.0)
    with file.with_suffix(".lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert anew() == Calibration(SAMPLES)
    assert measured == [0, 0]


def test_the_choices_are_those_that_copies_make() -> None:
    choices = Calibration(SAMPLES).choices()
    assert len(choices) == 8
    for choice in choices:
        key = 0 if choice.to_host else 1, ("runs", "rows").index(choice.form), 0 if choice.aligned else 1
        assert choice.least_nbytes == LEAST.get(key), choice
    assert Choice(True, "runs", True, 65536) in choices
    assert all(choice.least_nbytes is None for choice in Calibration().choices())


# ---- kvxfer doctor ------------------------------------------------------------------------------


def test_doctor_says_which_way_is_taken_from_which_run_on() -> None:
    finding = devices.host_copies(DEVICE, CUDA, Calibration(SAMPLES))
    assert finding.name == "GPU 0 host copies"
    to_host, from_host = finding.found.split("; ")
    assert "by copy engines runs of 64 KiB and more, rows that are not on 16 bytes of 16 KiB" in to_host
    assert "4 KiB 9.00, 64 KiB 1.01, 256 KiB 0.90" in to_host
    assert "from host memory by kernels (" in from_host
    assert "4 KiB 9.00, 64 KiB 1.50" in from_host


def test_doctor_says_why_there_is_no_calibration() -> None:
    assert "not calibrated yet" in devices.host_copies(DEVICE, CUDA, None).found
    assert "first agent" in devices.host_copies(DEVICE, CUDA, None).found
    assert "no batches" in devices.host_copies(DEVICE, CUDA, Calibration()).found
    older = devices.host_copies(DEVICE, (12, 6), None)
    assert "no batches" in older.found
    assert "12.8" in older.change
