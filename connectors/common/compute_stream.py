"""The stream of an engine's kernels: on a GPU a forward has returned long before they have run."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import kvxfer

# A word holds 32 bits, and an engine steps for months: what comes to this goes on with another word.
_MOST: Final = 2**31


class ComputeStream(Protocol):
    """Where an engine's kernels run, one after the other."""

    def record(self, trigger: kvxfer.Trigger, value: int) -> None:
        """Has the stream store a value once all that it was given before has run."""

    def hold(self, work: kvxfer.Group, layer: int) -> bool:
        """Has the stream wait until a layer is in, or its transfers have failed; False where it cannot."""


class TorchStream:
    """The stream to which torch gives its caller's work, on one GPU.

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
            if error.code != "unsupported":  # by this driver
                raise
            return False
        return True


class Mark(NamedTuple):
    """A place in a stream."""

    trigger: kvxfer.Trigger | None
    value: int

    @property
    def has_passed(self) -> bool:
        """Whether all before it has run."""
        return self.trigger is None or self.trigger.value >= self.value

    @property
    def after(self) -> Any:
        """What a transfer waits for that comes behind it (`kvxfer.Agent.read`)."""
        return None if self.trigger is None else self.trigger.at(self.value)


#: Where nothing runs on a stream.
PASSED: Final = Mark(None, 0)


class Marks:
    """Sets marks, each behind the last.

    Parameters
    ----------
    agent
        Makes the words that the stream stores to.
    stream
        None where what an engine has computed is there when it says so: every mark has passed then.
    """

    def __init__(self, agent: kvxfer.Agent, stream: ComputeStream | None) -> None:
        self._agent = agent
        self._stream = stream
        self._trigger: kvxfer.Trigger | None = None
        self._value = 0

    def set(self) -> Mark:
        """Returns the place behind all that the stream was given so far. One call of the driver."""
        if self._stream is None:
            return PASSED
        if self._trigger is None or self._value == _MOST:
            self._trigger, self._value = self._agent.trigger(), 0
        self._value += 1
        self._stream.record(self._trigger, self._value)
        return Mark(self._trigger, self._value)


class LayerMarks:
    """How many of a region's layers a stream has computed, step by step.

    Parameters
    ----------
    layers
        Of the region, numbered model-wide.
    """

    def __init__(self, agent: kvxfer.Agent, stream: ComputeStream, layers: range) -> None:
        self._agent = agent
        self._stream = stream
        self._layers = layers
        self._trigger = agent.trigger()
        self._before = 0  # of this step: every layer of the last one has less

    def after(self, first_layer: int) -> Any:
        """Returns what a transfer waits for, layer by layer, whose first is this one of the running step."""
        return self._trigger.by_layer(self._before + first_layer - self._layers.start + 1)

    def computed(self, count: int) -> None:
        """Lets the step's first `count` layers go once the stream has run what it was given so far."""
        self._stream.record(self._trigger, self._before + count)

    def step_done(self) -> None:
        """Lets all of the step's layers go likewise, and begins the next step."""
        self.computed(len(self._layers))
        self._before += len(self._layers)
        if self._before > _MOST:
            self._trigger, self._before = self._agent.trigger(), 0
