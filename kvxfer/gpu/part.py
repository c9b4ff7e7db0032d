"""The GPU options of an agent's native core: its copy kernels, their CTAs, and when to use copy engines."""

from __future__ import annotations

from typing import Any, Final

from kvxfer.gpu import calibration, loading
from kvxfer.gpu.calibration import Calibration
from kvxfer.options import AgentOptions

# By arithmetic (native/gpu/DESIGN.md) this many CTAs read over NVLink at 450 GB/s. A link cannot be measured
# before there is a peer at its other end, and each peer may be reached over another link.
IPC_CTAS: Final = 16


def of_agent(options: AgentOptions, device: int) -> dict[str, Any]:
    """Returns one of ``gpus`` of the native agent's options (`kvxfer._native.AgentCore`).

    Loads the kernels. If staging depends on the calibration, for its CTAs or its copy engines, and none
    exists yet, this also measures copies between the GPU and host memory.

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
