"""What an agent's core is told of its GPU: the kernels that copy there, their CTAs, and when engines do."""

from __future__ import annotations

from typing import Any, Final

from kvxfer.gpu import calibration, loading
from kvxfer.gpu.calibration import Calibration
from kvxfer.options import AgentOptions

# By arithmetic (native/gpu/DESIGN.md) so many read over NVLink at 450 GB/s. A link cannot be measured before
# there is a peer at its other end, and what a peer's memory is read over is another matter for each of them.
IPC_CTAS: Final = 16


def of_agent(options: AgentOptions, device: int) -> dict[str, Any]:
    """Returns one of ``gpus`` of the native agent's options (`kvxfer._native.AgentCore`).

    Loads the kernels, and has copies between the GPU and host memory calibrated where staging is to go by
    what that says, of CTAs or of copy engines, and nobody has done so yet.

    Raises
    ------
    UsageError
        ``unsupported``: kernels cannot run there.
    """
    kernels = loading.shared(device)
    given = options.gpu_ctas
    is_asked = options.staging_nbytes and (given is None or options.copy_engines)
    kept = calibration.shared(device) if is_asked else Calibration()
    return {
        "device": device,
        "kernels": loading.handles(kernels),
        "owner": kernels,
        "ipc_ctas": IPC_CTAS if given is None else given,
        "staging_ctas": kept.num_ctas if given is None else given,
        "staging_nbytes": options.staging_nbytes,
        "way_samples": list(kept.samples) if options.copy_engines else [],
    }
