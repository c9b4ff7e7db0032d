"""How copies between a GPU and host memory go: measured once, kept, read, and shown."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import _native
from kvxfer.doctor import devices
from kvxfer.gpu import availability, calibration, cubin_cache, loading, sources
from kvxfer.gpu.calibration import Calibration, Rate
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
# Four CTAs are within a sixteenth of eight in both directions; two are so only from the host.
CTA_SAMPLES = (
    (0, 1, 4 << 20, 800_000),
    (1, 1, 4 << 20, 600_000),
    (0, 2, 4 << 20, 400_000),
    (1, 2, 4 << 20, 212_500),
    (0, 4, 4 << 20, 210_000),
    (1, 4, 4 << 20, 201_000),
    (0, 8, 4 << 20, 200_000),
    (1, 8, 4 << 20, 200_000),
)
FOUND = Calibration(SAMPLES, CTA_SAMPLES)

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

    def prepare(
        samples: Any = SAMPLES,
        cta_samples: Any = CTA_SAMPLES,
        no_engines: str | None = None,
        error: tuple[int, str] | None = None,
    ) -> Measured:
        measured: Measured = []

        def gpu_calibrate(
            device: int, kernels: tuple[int, int, int]
        ) -> tuple[list[Any], list[Any], str | None]:
            measured.append(device)
            if error is not None:
                raise _native.NativeError(*error)
            return list(cta_samples), list(samples), no_engines

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


@pytest.fixture
def kept_file(folder: Path, measure: Callable[..., Measured]) -> Path:
    """The file of a calibration that was measured."""
    measure()
    calibration.shared(0)
    return only_file(folder)


def test_it_is_measured_once_and_then_read(folder: Path, measure: Callable[..., Measured]) -> None:
    measured = measure()
    assert calibration.look(DEVICE, CUDA) is None
    assert not folder.exists()
    assert calibration.shared(0) == FOUND
    assert calibration.shared(0) == anew() == calibration.look(DEVICE, CUDA) == FOUND
    assert measured == [0]
    assert folder.stat().st_mode & 0o077 == 0
    assert only_file(folder).stat().st_mode & 0o077 == 0


def test_it_is_of_one_gpu_one_driver_and_these_kernels(
    kept_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calibration.look(replace(DEVICE, name="NVIDIA H100 PCIe"), CUDA) is None
    assert calibration.look(replace(DEVICE, capability=(10, 0)), CUDA) is None
    assert calibration.look(DEVICE, (12, 9)) is None
    assert calibration.look(replace(DEVICE, index=3), CUDA) is not None  # one of several equal GPUs
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
    assert anew() == FOUND
    assert measured == [0, 0]
    assert file.read_bytes() == whole


CTA_ROW, WAY_ROW = "[0, 4, 4194304, 1000]", "[0, 0, 16, 65536, 1000, 1000]"
NO_WAYS = (
    "[0, 0, 16, 65536, 1000]",
    "[0, 0, 16, 65536, 1000, 0]",
    "[0, 0, 16, -1, 1000, 1000]",
    "[0, 0, 16, 1e999, 1000, 1000]",
    ", ".join([WAY_ROW] * 257),
    "[" * 9999,
)
NO_CTAS = (
    "",
    "[0, 4, 4194304]",
    "[2, 4, 4194304, 1000]",
    "[0, 0, 4194304, 1000]",
    "[0, 4, 4194304, 0]",
    f"[0, 4, 4194304, {1 << 48}]",
    "[0, 4, 4194304, NaN]",
    ", ".join([CTA_ROW] * 257),
)
NO_CALIBRATIONS = (
    *(f'{{"ctas": [{CTA_ROW}], "ways": [{rows}]}}' for rows in NO_WAYS),
    *(f'{{"ctas": [{rows}], "ways": []}}' for rows in NO_CTAS),
    *("null", "3", '"ctas"'),
    f"[{WAY_ROW}]",  # as the first version was written
    f'{{"ctas": [{CTA_ROW}]}}',
    *('{"ways": []}', '{"ctas": 4, "ways": []}', '{"ctas": {"4": 1000}, "ways": []}'),
)


def test_what_is_no_calibration_is_not_taken_for_one(kept_file: Path) -> None:
    def kept(body: str) -> Calibration | None:
        """Reads a file of such a body, whole by its sum."""
        data = body.encode()
        kept_file.write_bytes(b"%08x\n%s" % (zlib.crc32(data), data))
        return calibration.look(DEVICE, CUDA)

    assert kept(f'{{"ctas": [{CTA_ROW}], "ways": []}}') == Calibration((), ((0, 4, 4194304, 1000),))
    for body in NO_CALIBRATIONS:
        assert kept(body) is None, body[:200]


def test_a_file_of_an_older_version_is_not_looked_at(
    folder: Path, measure: Callable[..., Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measure()
    calibration.shared(0)
    monkeypatch.setattr(calibration, "_VERSION", calibration._VERSION + 1)
    assert calibration.look(DEVICE, CUDA) is None
    assert anew() == FOUND
    assert measured == [0, 0]


def test_of_another_user_s_file_nothing_is_taken(kept_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(kept_file, 12345, -1)
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
        assert calibration.shared(0) == calibration.shared(0) == FOUND
    assert measured == [0]
    assert "KVXFER_CACHE_DIR" in caplog.text
    monkeypatch.delenv("KVXFER_CACHE_DIR")
    monkeypatch.setattr(cubin_cache, "base", lambda: None)
    assert anew() == FOUND
    assert measured == [0, 0]


def test_where_nothing_can_be_measured_copies_go_by_kernels(
    folder: Path, measure: Callable[..., Measured], caplog: pytest.LogCaptureFixture
) -> None:
    measured = measure(error=(92, "in these words"))
    with caplog.at_level(logging.INFO, "kvxfer"):
        assert calibration.shared(0) == Calibration()
    assert "kernels of 4 CTAs make them: in these words" in caplog.text
    assert anew() == Calibration()
    assert measured == [0, 0]  # what passes is tried again by the next process


def test_where_there_are_no_engines_ctas_are_kept_and_the_log_says_why(
    folder: Path, measure: Callable[..., Measured], caplog: pytest.LogCaptureFixture
) -> None:
    measured = measure(samples=(), no_engines="in these words")
    with caplog.at_level(logging.INFO, "kvxfer"):
        assert calibration.shared(0) == Calibration((), CTA_SAMPLES)
    assert "not copy engines: in these words" in caplog.text
    assert anew() == Calibration((), CTA_SAMPLES)
    assert measured == [0]


@pytest.mark.parametrize(
    "found",
    [
        {"samples": (), "cta_samples": ()},
        {"samples": ()},
        {"cta_samples": ()},
        {"samples": (), "cta_samples": (), "no_engines": "none"},
    ],
)
def test_a_measurement_that_had_no_time_is_not_kept(
    folder: Path, measure: Callable[..., Measured], found: dict[str, Any]
) -> None:
    measured = measure(**found)
    expected = Calibration(found.get("samples", SAMPLES), found.get("cta_samples", CTA_SAMPLES))
    assert calibration.shared(0) == anew() == expected
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
        fcntl.flock(held, fcntl.LOCK_EX)  # the other process is measuring
        found: list[Calibration] = []
        second = threading.Thread(target=lambda: found.append(calibration.shared(0)))
        second.start()
        file.write_bytes(whole)
    second.join(60)
    assert found == [FOUND]
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
        assert anew() == FOUND
    assert measured == [0, 0]


def test_as_many_ctas_stage_as_were_found_to_do() -> None:
    assert FOUND.num_ctas == 4
    assert Calibration((), tuple(sample for sample in CTA_SAMPLES if sample[0] == 1)).num_ctas == 2
    assert Calibration().num_ctas == 4
    rates = FOUND.rates()
    assert [rate.num_ctas for rate in rates] == [1, 2, 4, 8]
    assert rates[0] == Rate(1, (4 << 20) / 800_000, (4 << 20) / 600_000)
    assert Calibration((), CTA_SAMPLES[:1]).rates() == [Rate(1, (4 << 20) / 800_000, None)]


# ---- kvxfer doctor ------------------------------------------------------------------------------


def test_doctor_says_why_there_is_no_calibration() -> None:
    assert "not calibrated yet" in devices.host_copies(DEVICE, CUDA, None).found
    assert "first agent" in devices.host_copies(DEVICE, CUDA, None).found
    assert "no batched copies" in devices.host_copies(DEVICE, CUDA, Calibration()).found
    older = devices.host_copies(DEVICE, (12, 6), None)
    assert "no batched copies" in older.found
    assert "not calibrated yet" in older.found  # CTAs are, without engines
    assert "12.8" in older.change


def test_doctor_says_how_many_ctas_stage_and_what_each_number_copies() -> None:
    shown = "kernels of 4 CTAs (GB/s to and from host memory, by CTAs: 1: 5.2 and 7.0, 2: 10.5 and 19.7, "
    finding = devices.host_copies(DEVICE, CUDA, FOUND)
    assert finding.found.startswith(shown + "4: 20.0 and 20.9, 8: 21.0 and 21.0); to host memory ")
    for version, missing in ((CUDA, "for this device"), ((12, 6), "batched copies")):
        finding = devices.host_copies(DEVICE, version, Calibration((), CTA_SAMPLES))
        assert finding.found.startswith(shown)
        assert finding.found.endswith(missing)
    one_way = devices.host_copies(DEVICE, CUDA, Calibration((), CTA_SAMPLES[:1])).found
    assert one_way.startswith("kernels of 1 CTA (")
    assert "1: 5.2 and unknown)" in one_way
    unknown = devices.host_copies(DEVICE, CUDA, Calibration()).found
    assert unknown.startswith("kernels of 4 CTAs, whose rates could not be measured; ")
