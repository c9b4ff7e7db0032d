"""Triggers, and everything else that a transfer can wait for before it starts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

from kvxfer._native import After, NativeError, trigger_over
from kvxfer._native import Trigger as Word
from kvxfer.arguments import count
from kvxfer.errors import invalid, translate
from kvxfer.gpu.streams import check_device, handle_of
from kvxfer.session.ownership import foreign

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

    from kvxfer.gpu.streams import CoreEvent, CoreStream, TorchEvent, TorchStream
    from kvxfer.session.completion import Completions

_MOST = 2**32 - 1


class Trigger:
    """A word of memory that transfers wait for: ``after=trigger``. Made by `Agent.trigger`.

    Its value begins at 0 and counts progress. The code that makes pages final stores to it: a thread
    (`fire`), a stream or a CUDA graph (`record`), a kernel (``kvxfer/device.cuh``, `share`) or another
    process (through the memory that `Agent.trigger` was given). Transfers that the store releases see
    everything that was written before it. One trigger serves any number of transfers of its agent. If several
    agents wait for one word, each makes a trigger over the same memory.

    All methods may be called from any thread. The word stays in place as long as a transfer waits for it,
    even if this object is gone.
    """

    __slots__ = ("_completions", "_word")

    def __init__(self, completions: Completions, word: Word) -> None:
        self._completions = completions
        self._word = word

    def __repr__(self) -> str:
        return f"<Trigger at {self.value}>"

    @property
    def value(self) -> int:
        """The word's value, 0 to 2**32 - 1."""
        return self._word.value

    def share(self) -> int:
        """Returns the address of the word (4 bytes), for stores by kernels and by other languages.

        Store with release order at system scope, and store growing values. From the first call on, waiting
        agents poll the word instead of being woken by `fire`, and its 4 bytes belong to this trigger until
        the process ends.
        """
        return self._word.share()

    def fire(self, value: int = 1) -> None:
        """Stores a value, unless the word holds a greater one, and wakes the agents that wait for it.

        Raises
        ------
        UsageError
            `value` is not 1 to 2**32 - 1.
        """
        self._word.fire(_value(value))

    def reset(self) -> None:
        """Sets the word to 0 for its next use. Transfers that were released stay released.

        Call it only when all expected stores have happened: a later store counts for the next use.
        """
        self._word.reset()

    def record(self, stream: Any, value: int = 1) -> None:
        """Makes a stream store a value when all its earlier work has ended.

        Parameters
        ----------
        stream
            A torch or cuda.core stream of the agent's GPU. If it is being captured, the graph stores the
            value whenever it runs; then call `reset` between two runs if transfers wait for both.
        value
            The value to store. Streams store it even over a greater one, so values must grow.

        Raises
        ------
        UsageError
            ``unsupported``: the agent has no GPU. ``invalid-argument``: `stream` is not a stream or belongs
            to another GPU, or the trigger is over a caller's memory that no GPU reaches.
        AgentError
            ``system``: the device has failed. ``closed``: the agent is closed.

        Notes
        -----
        One driver call, ``cuStreamWriteValue32``; the stream does not wait. Make triggers once and reuse
        them: the word of a recorded trigger is kept until the process ends, because a stream may store to it
        at any time.
        """
        handle = handle_of(stream)
        if handle is None:
            raise invalid(
                f"a trigger must be recorded in a torch or cuda.core stream, not in a {type(stream).__name__}"
            )
        try:
            self._completions.core.record(self._word, handle, _value(value))
        except NativeError as error:
            raise translate(error) from None

    def at(self, value: int) -> Threshold:
        """Returns an ``after=`` that releases all layers when the word holds `value` or more.

        ``trigger`` alone means ``trigger.at(1)``. If each thread block of a kernel adds one, pass the number
        of blocks.
        """
        return Threshold(self, _value(value), 0)

    def by_layer(self, first: int = 1, step: int = 1) -> Threshold:
        """Returns an ``after=`` that releases layers one after the other.

        Parameters
        ----------
        first, step
            The k-th layer of the transfer is released when the word holds ``first + k * step`` or more.
        """
        return Threshold(self, _value(first), _value(step))


class Threshold:
    """A trigger's value to wait for; `Trigger.at` and `Trigger.by_layer` make one for ``after=``."""

    __slots__ = ("_first", "_step", "_trigger")

    def __init__(self, trigger: Trigger, first: int, step: int) -> None:
        self._trigger = trigger
        self._first = first
        self._step = step

    def __repr__(self) -> str:
        by_layer = f" and {self._step} more for each layer" if self._step else ""
        return f"<{self._trigger!r} from {self._first} on{by_layer}>"


if TYPE_CHECKING:
    #: Types that ``after=`` accepts.
    StartsAfter: TypeAlias = (
        Trigger
        | Threshold
        | TorchStream
        | CoreStream
        | TorchEvent
        | CoreEvent
        | asyncio.Future[Any]
        | concurrent.futures.Future[Any]
    )


def trigger_of(completions: Completions, memory: Any) -> Trigger:
    """Returns a trigger at 0; `Agent.trigger` says what `memory` may be."""
    try:
        return Trigger(completions, completions.core.trigger() if memory is None else trigger_over(memory))
    except NativeError as error:
        raise translate(error) from None
    except (TypeError, BufferError, ValueError) as error:
        raise invalid(f"memory must be 4 writable bytes, e.g. a numpy array: {error}") from None


def resolve(completions: Completions, gpu: int, after: Any) -> After | bool:
    """Turns a caller's ``after=``, a `StartsAfter`, into the native condition of a transfer.

    Returns True for a future that is still to release the transfer, False for one that is done.
    """
    if isinstance(after, Trigger):
        after = after.at(1)
    if isinstance(after, Threshold):
        trigger = after._trigger
        if trigger._completions is not completions:
            instead = (
                "make one with this agent's trigger(), over the same memory if both must wait for one word"
            )
            raise foreign(completions, trigger, repr(trigger), instead)
        return After(trigger._word, after._first, after._step)
    if hasattr(after, "add_done_callback"):
        return not (after.done() and not after.cancelled() and after.exception() is None)
    try:
        if (stream := handle_of(after)) is not None:
            check_device(after, gpu)
            return completions.core.after_stream(stream)
        if (event := _event(after)) is not None:
            check_device(after, gpu)
            _check_no_capture()
            return completions.core.after_event(event)
    except NativeError as error:
        raise translate(error) from None
    raise invalid(
        "after must be a Trigger, a stream or an event of torch or cuda.core, or a future, not a "
        f"{type(after).__name__}"
    )


def _check_no_capture() -> None:
    """Raises `UsageError` if torch's current stream is being captured.

    The event may then belong to the capture, and no driver call can check that without breaking the capture.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise invalid(
            "the transfer waits for an event, but the current stream is being captured into a graph, which "
            "runs later or many times: make a trigger with agent.trigger(), record() it in the stream, and "
            "wait for that"
        )


def _event(event: Any) -> int | None:
    """Returns the driver's handle of an event; None for other objects."""
    if hasattr(event, "cuda_event"):  # torch, which makes one when it is first recorded
        handle = event.cuda_event
    elif hasattr(event, "handle") and hasattr(event, "is_done"):  # cuda.core
        handle = event.handle
    else:
        return None
    if not handle or not int(handle):
        raise invalid(
            "the event was never recorded: record it in the stream that writes the pages before you pass it"
        )
    return int(handle)


def _value(value: SupportsIndex) -> int:
    return count(value, "a trigger's value", 1, _MOST)
