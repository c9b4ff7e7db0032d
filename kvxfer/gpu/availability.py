"""Whether this process can run GPU kernels, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.errors import UsageError
from kvxfer.gpu import compiler, driver
from kvxfer.gpu.architecture import LEAST_SM, sm_of
from kvxfer.gpu.kernels import KERNELS
from kvxfer.gpu.origin import Origin, look


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether GPU kernels can run here.

    Attributes
    ----------
    reason
        Why they cannot, in one sentence: what is missing, a colon, what to do about it. ``""`` if they can.
    device
        The GPU in question, if it exists.
    driver_version
        The driver's CUDA version, as in `kvxfer.gpu.driver.Driver`.
    origins
        For each kernel that runs on this GPU: where its cubin comes from, or would come from.
    """

    reason: str = ""
    device: driver.Device | None = None
    driver_version: tuple[int, int] = (0, 0)
    origins: tuple[tuple[str, Origin], ...] = ()

    @property
    def usable(self) -> bool:
        return not self.reason

    @property
    def missing(self) -> str:
        """The reason's first half."""
        return self.reason.rpartition(": ")[0]

    @property
    def change(self) -> str:
        """The reason's second half."""
        return self.reason.rpartition(": ")[2]


def availability(index: int = 0) -> Availability:
    """Returns whether GPU kernels can run on a device, without compiling or loading any.

    Takes up to a second if this process has not used the driver or cuda-core before.
    """
    found = driver.look()
    if found.failure:
        return Availability(f"{found.failure}: {found.change}", driver_version=found.version)
    if not 0 <= index < len(found.devices):
        reason = f"there is no GPU {index}: the driver offers {len(found.devices)} to this process"
        return Availability(reason, driver_version=found.version)
    return of_device(found.devices[index], found.version)


def of_device(device: driver.Device, driver_version: tuple[int, int]) -> Availability:
    """Returns the same as `availability`, for a known device."""
    if sm_of(device.architecture) < LEAST_SM:
        reason = (
            f"{device.name} has compute capability {'.'.join(map(str, device.capability))}, but the kernels "
            f"need {LEAST_SM // 10}.{LEAST_SM % 10}: use a newer GPU"
        )
        return Availability(reason, device, driver_version)
    origins = []
    try:
        compiler.check_installed()
        for kernel in KERNELS:
            if kernel.runs_on(device.architecture):
                origin, _ = look(kernel, device.architecture, driver_version)
                origins.append((kernel.name, origin))
    except UsageError as error:
        return Availability(str(error.args[0]), device, driver_version)
    return Availability("", device, driver_version, tuple(origins))


def check(index: int = 0) -> tuple[driver.Device, tuple[int, int]]:
    """Returns a device on which kernels can run, and the driver's version.

    Raises
    ------
    UsageError
        ``unsupported``: they cannot; the message is `Availability.reason`.
    """
    found = availability(index)
    if found.device is None or not found.usable:
        raise UsageError(f"GPU kernels cannot run here: {found.reason}", code="unsupported")
    return found.device, found.driver_version
