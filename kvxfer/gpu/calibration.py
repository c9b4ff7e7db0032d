"""Which way copies between a GPU and host memory go, as this machine was measured: kernels, or copy engines.

Measured in a second at most when the first agent that stages pages of such a GPU is made, and kept in
`calibrations` beside the compiled kernels (`kvxfer.gpu.cubin_cache`), so that later processes read it. Files
are named by what the result depends on. A file that is damaged or cannot be written costs a second, no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvxfer.gpu import availability, compiler, cubin_cache, driver, loading, sources
from kvxfer.gpu.kernels import KERNELS
from kvxfer.log import logger

if TYPE_CHECKING:
    from kvxfer._native import GpuSample

#: The driver's CUDA that brought batches of copies.
LEAST_CUDA: Final = (12, 8)
# Of what is measured, and how it is written.
_VERSION: Final = 1
# 28 samples of six numbers take 2 KiB.
_MAX_NBYTES: Final = 64 * 1024
_MAX_SAMPLES: Final = 256
# Another process that measures the same takes a second.
_LOCK_S: Final = 2.0
_FORMS: Final = ("runs", "rows")


@dataclass(frozen=True, slots=True)
class Choice:
    """From which runs on copy engines are taken.

    Attributes
    ----------
    to_host
        Whether the copy goes to host memory; else from there.
    form
        ``"runs"`` that lie anywhere, or ``"rows"`` at regular distances.
    aligned
        Whether addresses and lengths are multiples of 16 bytes.
    least_nbytes
        Of a run; None: engines are never taken.
    """

    to_host: bool
    form: str
    aligned: bool
    least_nbytes: int | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured; without samples everything goes by kernels.

    Attributes
    ----------
    samples
        Direction (0: to the host, 1: to the device), form (0: runs, 1: rows), alignment in bytes, bytes of a
        run, and what the same bytes took by kernels and by copy engines, in ns.
    """

    samples: tuple[GpuSample, ...] = ()

    def choices(self) -> list[Choice]:
        """Returns what follows from the samples, by the function that copies ask."""
        from kvxfer import _native

        return [
            Choice(direction == 0, _FORMS[form], loose == 0, least)
            for direction, form, loose, least in _native.gpu_least_runs(list(self.samples))
        ]


def shared(device_index: int) -> Calibration:
    """Returns a device's calibration: this process's, that of the file, or measured now and kept.

    Never raises for what goes wrong in measuring: the log says it, and copies go by kernels.

    Raises
    ------
    UsageError
        ``unsupported``: kernels cannot run there.
    """
    return _shared(device_index)


@functools.cache
def _shared(device_index: int) -> Calibration:
    device, version = availability.check(device_index)
    if (found := look(device, version)) is not None:
        return found
    kernels = loading.handles(loading.shared(device_index))
    with _alone(device, version):
        # Another process may have been at it.
        if (found := look(device, version)) is not None:
            return found
        measured, is_kept = _measure(device_index, kernels)
        if is_kept:
            _store(device, version, measured)
        return measured


def look(device: driver.Device, driver_version: tuple[int, int]) -> Calibration | None:
    """Returns what the file of a device holds; None where there is none, or none that is whole."""
    path = _path_of(device, driver_version)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid not in (os.geteuid(), 0):
                return None
            return _parse(file.read(_MAX_NBYTES))
    except OSError:
        return None


def _measure(device_index: int, kernels: tuple[int, int, int]) -> tuple[Calibration, bool]:
    """Returns what was found, and whether the next process would find the same."""
    from kvxfer import _native

    try:
        measured = Calibration(tuple(_native.gpu_calibrate(device_index, kernels)))
    except _native.NativeError as error:
        logger().info("copies between GPU %d and host memory go by kernels: %s", device_index, error.args[1])
        # The driver has no engines for us, which stays so; or memory was short, which may pass.
        return Calibration(), error.args[0] == "unsupported"
    return measured, bool(measured.samples)


def _path_of(device: driver.Device, driver_version: tuple[int, int]) -> Path | None:
    place = cubin_cache.base()
    if place is None:
        return None
    digest = hashlib.sha256()
    digest.update(f"{_VERSION} {driver_version[0]}.{driver_version[1]} {device.name}\n".encode())
    for kernel in KERNELS:
        if kernel.runs_on(device.architecture):
            digest.update(sources.key_of(kernel, device.architecture, compiler.OPTIONS).encode())
    return place / "calibrations" / f"{device.architecture}-{digest.hexdigest()[:24]}.json"


def _parse(data: bytes) -> Calibration | None:
    try:
        head, _, body = data.partition(b"\n")
        if int(head, 16) != zlib.crc32(body):
            return None
        rows = json.loads(body)
        samples = tuple((int(a), int(b), int(c), int(d), int(e), int(f)) for a, b, c, d, e, f in rows)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return None
    if len(samples) > _MAX_SAMPLES or not all(_is_sound(sample) for sample in samples):
        return None
    return Calibration(samples)


def _is_sound(sample: GpuSample) -> bool:
    direction, form, alignment, *rest = sample
    return (
        direction in (0, 1)
        and form in (0, 1)
        and 0 < alignment <= 4096
        and all(0 < number < 1 << 48 for number in rest)
    )


def _store(device: driver.Device, driver_version: tuple[int, int], measured: Calibration) -> None:
    path = _path_of(device, driver_version)
    if path is None:
        return
    body = json.dumps(measured.samples).encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        cubin_cache.write_whole(path, b"%08x\n%s" % (zlib.crc32(body), body))
    except OSError as error:
        logger().info(
            "the calibration of copies is not kept, so every process takes a second for one: %s; name a "
            "folder that can be written with KVXFER_CACHE_DIR",
            error,
        )


@contextlib.contextmanager
def _alone(device: driver.Device, driver_version: tuple[int, int]) -> Iterator[None]:
    """Keeps other processes from measuring at the same time, which would disturb both; for a while."""
    path = _path_of(device, driver_version)
    lock = -1
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _await_lock(lock)
    try:
        yield
    finally:
        if lock >= 0:
            os.close(lock)


def _await_lock(lock: int) -> None:
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return None
            time.sleep(0.01)
