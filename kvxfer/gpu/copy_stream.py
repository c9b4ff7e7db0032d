"""Streams of copies on a GPU: by the kernels of native/gpu, or, to and from the host, by copy engines."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer import _native
from kvxfer.errors import translate
from kvxfer.gpu import calibration, loading
from kvxfer.plan.program import CopyProgram

#: The two ends of a copy; host memory is pinned.
Direction: TypeAlias = Literal["to_host", "to_device", "on_device"]
_DIRECTIONS: Final[dict[Direction, int]] = {"to_host": 0, "to_device": 1, "on_device": 2}


class CopyStream:
    """A CUDA stream that runs copy programs between memories that a device reaches.

    These are memory of the device, memory of a peer that it may access, and pinned host memory. Unlike an
    agent, this class checks no leases, lengths or lifetimes: it trusts addresses, and memory must stay until
    its copies are `done`. Only one thread may use a stream at a time.

    Parameters
    ----------
    device
        Index of the GPU, as CUDA_VISIBLE_DEVICES leaves them.
    num_ctas
        Most CTAs of a kernel, which it takes from the model. 4 are enough for a 400 Gb/s NIC.
    tables_nbytes
        Room for block tables of copies that have not ended, 8 bytes a pair.
    high_priority
        Whether its CTAs are scheduled before those of ordinary streams.
    bulk
        Whether to use bulk copies if device and pages allow them; for comparisons.
    copy_engines
        Which copies to and from host memory use copy engines: ``"never"`` none; ``"calibrated"`` those that
        the device's calibration selects (measured now if necessary); ``"always"`` all that need no
        conversion.

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
        # Keeps the kernels loaded as long as this object exists.
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
            From `kvxfer.plan.compile_program`.
        src_ids, dst_ids
            Ids of units from `kvxfer.plan.units.pair_units`; the last `num_fine` are ids of tokens.
        src, dst
            Addresses of the regions' first bytes.
        layers
            In the destination's numbers, from 0; None: all layers of the program.
        direction
            Says whether one side is pinned host memory. ``"on_device"`` uses kernels, which reach that memory
            as well.

        Raises
        ------
        UsageError
            ``again``: the tables of earlier copies take all the room until they are `done`. Other codes name
            what is wrong with these tables: their lengths, their size, or an id of 2^31 or more.
        AgentError
            The device failed and cannot be used in this process any more.
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
        """Whether copy engines can be used.

        Needs the driver's calls (CUDA 12.8), and a device that has not refused them.
        """
        return self._stream.has_copy_engines

    def wait_for(self, event: int) -> None:
        """Makes later copies begin after a CUevent."""
        try:
            self._stream.wait_for(event)
        except _native.NativeError as error:
            raise translate(error) from None

    @property
    def done(self) -> int:
        """Returns the ticket up to which all copies have ended, with visible bytes. Costs one load."""
        return self._stream.done()

    def synchronize(self) -> None:
        """Waits until every copy has ended; raises `AgentError` if the device failed."""
        try:
            self._stream.synchronize()
            self._stream.check()
        except _native.NativeError as error:
            raise translate(error) from None

    def set_num_ctas(self, num_ctas: int) -> None:
        """Changes the most CTAs of later kernels."""
        self._stream.set_num_ctas(num_ctas)

    def close(self) -> None:
        """Waits for submitted copies, and ends the stream."""
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
