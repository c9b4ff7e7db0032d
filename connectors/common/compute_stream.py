"""The stream of an engine's kernels: on a GPU, a forward returns long before its kernels have run."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import kvxfer

# A trigger's word has 32 bits, and an engine may step for months: at this value, marks use a new trigger.
_MOST: Final = 2**31


class ComputeStream(Protocol):
    """The stream in which an engine's kernels run, one after the other."""

    def record(self, trigger: kvxfer.Trigger, value: int) -> None:
        """Makes the stream store a value once all work queued before has run."""

    def hold(self, work: kvxfer.Group, layer: int) -> bool:
        """Makes the stream wait until a layer has arrived or its transfers failed; False if it cannot."""


class TorchStream:
    """Torch's current stream on one GPU.

    Parameters
    ----------
    gpu
        Its index.
    """

    def __init__(self, gpu: int) -> None:
        import torch

        self._gpu = gpu
        self._current = torch.cuda.current_stream

    def record(self, trigger: kvxfer.Trigger, value: int) -> None:
        trigger.record(self._current(self._gpu), value)

    def hold(self, work: kvxfer.Group, layer: int) -> bool:
        try:
            for member in work.members:
                if layer in member.layers:
                    member.wait_in(self._current(self._gpu), layer)
        except kvxfer.UsageError as error:
            if error.code != "unsupported":  # the driver cannot do it
                raise
            return False
        return True


class Mark(NamedTuple):
    """A position in a stream."""

    trigger: kvxfer.Trigger | None
    value: int

    @property
    def has_passed(self) -> bool:
        """Whether all work before the mark has run."""
        return self.trigger is None or self.trigger.value >= self.value

    @property
    def after(self) -> Any:
        """The `after` argument for a transfer that must wait for this mark (`kvxfer.Agent.read`)."""
        return None if self.trigger is None else self.trigger.at(self.value)


#: The mark for engines without a stream.
PASSED: Final = Mark(None, 0)


class Marks:
    """Sets marks in a stream, one after the other.

    Parameters
    ----------
    agent
        Makes the triggers whose words the stream stores to.
    stream
        None if the engine computes synchronously: every mark has passed at once.
    """

    def __init__(self, agent: kvxfer.Agent, stream: ComputeStream | None) -> None:
        self._agent = agent
        self._stream = stream
        self._trigger: kvxfer.Trigger | None = None
        self._value = 0

    def set(self) -> Mark:
        """Returns a mark behind all work queued so far. Costs one call of the driver."""
        if self._stream is None:
            return PASSED
        if self._trigger is None or self._value == _MOST:
            self._trigger, self._value = self._agent.trigger(), 0
        self._value += 1
        self._stream.record(self._trigger, self._value)
        return Mark(self._trigger, self._value)


class LayerMarks:
    """Counts the layers of a region that a stream has computed, step by step.

    Parameters
    ----------
    layers
        The region's layers, numbered model-wide.
    """

    def __init__(self, agent: kvxfer.Agent, stream: ComputeStream, layers: range) -> None:
        self._agent = agent
        self._stream = stream
        self._layers = layers
        self._trigger = agent.trigger()
        self._before = 0  # the count at the start of this step; all earlier steps' layers are at or below it

    def after(self, first_layer: int) -> Any:
        """Returns the `after` of a transfer that waits layer by layer, from `first_layer` of this step on."""
        return self._trigger.by_layer(self._before + first_layer - self._layers.start + 1)

    def computed(self, count: int) -> None:
        """Releases the step's first `count` layers once the stream has run the work queued so far."""
        self._stream.record(self._trigger, self._before + count)

    def step_done(self) -> None:
        """Releases all of the step's layers in the same way, and begins the next step."""
        self.computed(len(self._layers))
        self._before += len(self._layers)
        if self._before > _MOST:
            self._trigger, self._before = self._agent.trigger(), 0
