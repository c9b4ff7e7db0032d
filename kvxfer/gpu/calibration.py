"""Measures on this machine how to copy between a GPU and host memory: with how many CTAs, or by copy engines.

The measurement takes a second at most, when the first agent is made that stages pages of such a GPU. The
result is kept in `calibrations` beside the compiled kernels (`kvxfer.gpu.cubin_cache`), where later processes
read it. A file's name contains everything that the result depends on. If a file is damaged or cannot be
written, the only cost is another second.
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
    from kvxfer._native import GpuCtaSample, GpuSample

#: The driver's CUDA version that introduced batched copies.
LEAST_CUDA: Final = (12, 8)
# Version of the measurement and of the file format.
_VERSION: Final = 2
# 28 samples of six numbers, and 8 of four, take 2 KiB.
_MAX_NBYTES: Final = 64 * 1024
# native/bindings/gpu.cpp, native/gpu/cta_choice.h.
_MAX_SAMPLES: Final = 256
_MAX_CTAS: Final = 8
# Another process's measurement takes a second.
_LOCK_S: Final = 2.0
_FORMS: Final = ("runs", "rows")


@dataclass(frozen=True, slots=True)
class Choice:
    """The least run for which copy engines are used.

    Attributes
    ----------
    to_host
        Whether the copy goes to host memory; otherwise it comes from there.
    form
        ``"runs"`` at arbitrary addresses, or ``"rows"`` at regular distances.
    aligned
        Whether addresses and lengths are multiples of 16 bytes.
    least_nbytes
        Least bytes of a run; None: engines are never used.
    """

    to_host: bool
    form: str
    aligned: bool
    least_nbytes: int | None


@dataclass(frozen=True, slots=True)
class Rate:
    """Measured copy rates of kernels with this many CTAs.

    Attributes
    ----------
    to_host, from_host
        10^9 bytes a second; None if it was not measured.
    """

    num_ctas: int
    to_host: float | None
    from_host: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements. Without samples all copies use kernels, of four CTAs.

    Attributes
    ----------
    samples
        Direction (0: to the host, 1: to the device), form (0: runs, 1: rows), alignment in bytes, bytes of a
        run, and the times in ns that kernels and copy engines took for the same bytes. Empty if the driver
        offers no copy engines.
    cta_samples
        Direction, CTAs of a kernel, the bytes that it copied, and the time in ns.
    """

    samples: tuple[GpuSample, ...] = ()
    cta_samples: tuple[GpuCtaSample, ...] = ()

    @property
    def num_ctas(self) -> int:
        """CTAs for staging pages: the fewest whose rate is near the best, or 4 without measurements.

        Uses the same native function as the calibration.
        """
        from kvxfer import _native

        return _native.gpu_staging_ctas(list(self.cta_samples))

    def rates(self) -> list[Rate]:
        """Returns the measured rates by number of CTAs, ascending."""
        best: dict[int, list[float]] = {}
        for direction, num_ctas, nbytes, ns in self.cta_samples:
            of_number = best.setdefault(num_ctas, [0.0, 0.0])
            of_number[direction] = max(of_number[direction], nbytes / ns)
        return [Rate(num, to or None, back or None) for num, (to, back) in sorted(best.items())]

    def choices(self) -> list[Choice]:
        """Returns the choices that follow from the samples, from the same native function that copies use."""
        from kvxfer import _native

        return [
            Choice(direction == 0, _FORMS[form], loose == 0, least)
            for direction, form, loose, least in _native.gpu_least_runs(list(self.samples))
        ]


def shared(device_index: int) -> Calibration:
    """Returns a device's calibration: from this process, from the file, or measured now and kept.

    A failed measurement never raises: it is logged, and copies use kernels.

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
        # Another process may have measured meanwhile.
        if (found := look(device, version)) is not None:
            return found
        measured, is_kept = _measure(device_index, kernels)
        if is_kept:
            _store(device, version, measured)
        return measured


def look(device: driver.Device, driver_version: tuple[int, int]) -> Calibration | None:
    """Returns the calibration in a device's file; None if there is no file, or it is damaged."""
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
    """Returns the measurements, and whether they are complete and would be the same in another process."""
    from kvxfer import _native

    try:
        cta_samples, samples, no_engines = _native.gpu_calibrate(device_index, kernels)
    except _native.NativeError as error:
        logger().info(
            "copies between GPU %d and host memory could not be measured, so kernels of %d CTAs make them: "
            "%s",
            *(device_index, Calibration().num_ctas, error.args[1]),
        )
        return Calibration(), False
    if no_engines is not None:
        logger().info(
            "kernels make the copies between GPU %d and host memory, not copy engines: %s",
            device_index,
            no_engines,
        )
    # A driver without copy engines stays so, but a lack of time may be temporary.
    is_whole = bool(cta_samples) and (bool(samples) or no_engines is not None)
    return Calibration(tuple(samples), tuple(cta_samples)), is_whole


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
        kept = json.loads(body)
        samples = tuple((int(a), int(b), int(c), int(d), int(e), int(f)) for a, b, c, d, e, f in kept["ways"])
        cta_samples = tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in kept["ctas"])
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    # Every complete measurement has CTA samples.
    if not cta_samples or len(samples) > _MAX_SAMPLES or len(cta_samples) > _MAX_SAMPLES:
        return None
    if not all(_is_sound(sample) for sample in samples) or not all(map(_is_sound_of_ctas, cta_samples)):
        return None
    return Calibration(samples, cta_samples)


def _is_sound(sample: GpuSample) -> bool:
    direction, form, alignment, *rest = sample
    return direction in (0, 1) and form in (0, 1) and 0 < alignment <= 4096 and _are_measured(*rest)


def _is_sound_of_ctas(sample: GpuCtaSample) -> bool:
    direction, num_ctas, *rest = sample
    return direction in (0, 1) and 0 < num_ctas <= _MAX_CTAS and _are_measured(*rest)


def _are_measured(*numbers: int) -> bool:
    return all(0 < number < 1 << 48 for number in numbers)


def _store(device: driver.Device, driver_version: tuple[int, int], measured: Calibration) -> None:
    path = _path_of(device, driver_version)
    if path is None:
        return
    body = json.dumps({"ctas": measured.cta_samples, "ways": measured.samples}).encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        cubin_cache.write_whole(path, b"%08x\n%s" % (zlib.crc32(body), body))
    except OSError as error:
        logger().info(
            "the calibration of copies cannot be stored, so every process takes a second to measure again: "
            "%s; set KVXFER_CACHE_DIR to a folder that can be written",
            error,
        )


@contextlib.contextmanager
def _alone(device: driver.Device, driver_version: tuple[int, int]) -> Iterator[None]:
    """Locks out other processes' measurements for a while, because two at a time disturb each other."""
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
