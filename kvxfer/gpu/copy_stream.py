"""Copies on a GPU, one after the other: by the kernels of native/gpu, or with the host by copy engines."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.errors import translate
from kvxfer.gpu import calibration, loading
from kvxfer.plan.program import CopyProgram

#: What a copy goes between; the host's memory is pinned.
Direction: TypeAlias = Literal["to_host", "to_device", "on_device"]
_DIRECTIONS: Final[dict[Direction, int]] = {"to_host": 0, "to_device": 1, "on_device": 2}


class CopyStream:
    """A CUDA stream on which copy programs run between memories that a device reaches.

    That is memory of the device, of a peer that it may access, and pinned memory of the host. Nobody
    looks after leases, lengths or lifetimes here, as an agent does: addresses are trusted, and memory must
    stay until what copies it is `done`. One thread uses a stream at a time.

    Parameters
    ----------
    device
        Index of the GPU, as CUDA_VISIBLE_DEVICES leaves them.
    num_ctas
        Most CTAs of a kernel: what the copy may take from the model. 4 feed a 400 Gb/s NIC.
    tables_nbytes
        Bytes of block tables that may be under way, 8 for each pair.
    high_priority
        Whether its CTAs are placed before those of ordinary streams.
    bulk
        Whether bulk copies are used where device and pages allow them; for comparisons.
    copy_engines
        What of copies to and from host memory goes by copy engines: ``"never"`` anything, what the device's
        calibration says (``"calibrated"``, measured where that is still to be done), or ``"always"``
        everything that is not converted.

    Raises
    ------
    UsageError
        ``unsupported``: no usable GPU, with the reason.
    """

    def __init__(
        self,
        device: int = 0,
        *,
        num_ctas: int = 4,
        tables_nbytes: int = 1 << 20,
        high_priority: bool = True,
        bulk: bool = True,
        copy_engines: Literal["never", "calibrated", "always"] = "never",
    ) -> None:
        # Unloaded with this object.
        self._kernels = loading.load_all(device, bulk=bulk)
        samples: list[_native.GpuSample] | None = None if copy_engines == "always" else []
        if copy_engines == "calibrated":
            samples = list(calibration.shared(device).samples)
        try:
            self._stream = _native.GpuCopyStream(
                device, loading.handles(self._kernels), num_ctas, tables_nbytes, high_priority, samples
            )
        except _native.NativeError as error:
            raise translate(error) from None
        self._programs: dict[int, tuple[CopyProgram, _native.GpuProgram]] = {}

    @property
    def handle(self) -> int:
        """The CUstream, for events and for ``torch.cuda.ExternalStream``."""
        return self._stream.handle

    def copy(
        self,
        program: CopyProgram,
        src_ids: NDArray[np.uint32],
        dst_ids: NDArray[np.uint32],
        *,
        src: int,
        dst: int,
        layers: range | None = None,
        num_fine: int = 0,
        direction: Direction = "on_device",
    ) -> int:
        """Submits a copy and returns its ticket; never waits.

        Parameters
        ----------
        program
            As `kvxfer.plan.compile_program` makes it.
        src_ids, dst_ids
            Ids of units, as `kvxfer.plan.units.pair_units` makes them; the last `num_fine` of tokens.
        src, dst
            Addresses of the regions' first bytes.
        layers
            As the destination counts its own, from 0; None: all of the program.
        direction
            Whether one side is pinned memory of the host. ``"on_device"`` goes by kernels, which reach
            that memory as well.

        Raises
        ------
        UsageError
            ``again``: tables of earlier copies fill the room, until they are `done`. Else what is wrong with
            these: their lengths, their size, an id of 2^31 or more.
        AgentError
            The device failed; nothing works on it in this process any more.
        """
        window = range(program.num_program_layers) if layers is None else layers
        try:
            return self._stream.submit(
                self._parsed(program),
                (window.start, len(window)),
                src_ids,
                dst_ids,
                num_fine,
                src,
                dst,
                _DIRECTIONS[direction],
            )
        except _native.NativeError as error:
            raise translate(error) from None

    @property
    def has_copy_engines(self) -> bool:
        """False where the driver has no calls for them (CUDA 12.8), or the device has refused them."""
        return self._stream.has_copy_engines

    def wait_for(self, event: int) -> None:
        """Has what is copied from now on begin after a CUevent."""
        try:
            self._stream.wait_for(event)
        except _native.NativeError as error:
            raise translate(error) from None

    @property
    def done(self) -> int:
        """Copies with tickets up to this have ended, and their bytes are seen. Costs one load."""
        return self._stream.done()

    def synchronize(self) -> None:
        """Waits until every copy has ended; raises `AgentError` where the device failed."""
        try:
            self._stream.synchronize()
            self._stream.check()
        except _native.NativeError as error:
            raise translate(error) from None

    def set_num_ctas(self, num_ctas: int) -> None:
        """Changes the most CTAs of kernels to come."""
        self._stream.set_num_ctas(num_ctas)

    def close(self) -> None:
        """Waits for what was submitted, and ends the stream."""
        self._stream.close()

    def __enter__(self) -> CopyStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parsed(self, program: CopyProgram) -> _native.GpuProgram:
        # By identity: programs are compiled once for each pair of layouts, and kept.
        found = self._programs.get(id(program))
        if found is None:
            units = (program.src_units, program.dst_units, program.src_tokens, program.dst_tokens)
            parsed = _native.GpuProgram(
                program.num_program_layers, program.loops, program.conversions, program.scales, units
            )
            found = self._programs[id(program)] = program, parsed
        return found[1]
