"""Checks whether an agent can register GPU memory."""

from __future__ import annotations

from kvxfer.errors import UsageError
from kvxfer.gpu import availability, driver
from kvxfer.layout.tensor import UNTOLD_GPU, TensorView
from kvxfer.options import AgentOptions


def device_of(region: str, views: list[TensorView], options: AgentOptions) -> int:
    """Returns the index of the GPU that holds the tensors, which must be the agent's GPU.

    Raises
    ------
    UsageError
        ``unsupported``: kernels cannot run here, with `Availability.reason`; the agent has no GPU; or a
        tensor lies in host memory or on another GPU.
    """
    placed = [_place(view) for view in views]
    names = sorted({_name(index) for index in placed})
    if len(names) > 1:
        raise _unsupported(
            f"region {region!r} would lie on {' and '.join(names)}, but a region must lie in one memory: "
            "register one region for each"
        )
    device = options.gpu_in_use
    if device is None:
        reason = availability.availability(max(placed[0] or 0, 0)).reason
        if reason:
            raise _unsupported(
                f"region {region!r} would lie on {names[0]}, but GPU kernels cannot run here: {reason}"
            )
        _check_known(region, placed[0])
        raise _unsupported(
            f"region {region!r} would lie on {names[0]}, but this agent has no GPU: make it with "
            f"AgentOptions(gpu={placed[0]}), or register a cache in host memory"
        )
    _check_known(region, placed[0])
    if placed[0] != device:
        raise _unsupported(
            f"region {region!r} would lie on {names[0]}, but this agent's GPU is {device}, and an agent has "
            f"only one: make another agent with AgentOptions(gpu={placed[0]})"
        )
    return device


def _check_known(region: str, index: int | None) -> None:
    if index == UNTOLD_GPU:
        raise _unsupported(
            f"region {region!r} would lie at an address that belongs to no GPU by the driver: the memory was "
            "freed, or is another process's; register tensors that this process has allocated"
        )


def _place(view: TensorView) -> int | None:
    if view.gpu != UNTOLD_GPU:
        return view.gpu
    # Only the driver knows the owner. If the driver does not know it, kernels would fault on this memory.
    index = driver.device_of(view.address)
    return UNTOLD_GPU if index is None else index


def _name(index: int | None) -> str:
    if index is None:
        return "host memory"
    return "a GPU that the driver does not know" if index == UNTOLD_GPU else f"GPU {index}"


def _unsupported(message: str) -> UsageError:
    return UsageError(message, code="unsupported")
