"""Streams and events of torch and cuda.core."""

from __future__ import annotations

from typing import Any, Protocol

from kvxfer.errors import invalid


class TorchStream(Protocol):
    """What a `torch.cuda.Stream` has."""

    @property
    def cuda_stream(self) -> int:
        """The driver's handle."""
        ...


class CoreStream(Protocol):
    """What a stream of cuda.core has."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version, and the driver's handle."""
        ...


class TorchEvent(Protocol):
    """What a `torch.cuda.Event` has."""

    @property
    def cuda_event(self) -> int:
        """The driver's handle."""
        ...


class CoreEvent(Protocol):
    """What an event of cuda.core has."""

    @property
    def handle(self) -> Any:
        """The driver's handle."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether all earlier work has ended."""
        ...


def handle_of(stream: Any) -> int | None:
    """Returns the driver's handle of a stream; None for other objects."""
    if (handle := getattr(stream, "cuda_stream", None)) is not None:  # torch
        return int(handle)
    if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:  # cuda.core
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    return None


def check_device(what: Any, gpu: int) -> None:
    """Raises `UsageError` if a stream or an event names a GPU other than the agent's."""
    device = getattr(what, "device", None)
    index = getattr(device, "index", None) if hasattr(device, "index") else getattr(device, "device_id", None)
    if index is not None and index != gpu:
        kind = "event" if handle_of(what) is None else "stream"
        raise invalid(
            f"the {kind} is on GPU {index}, but the agent's GPU is {gpu}: pass one on that GPU, or use a "
            "trigger"
        )
