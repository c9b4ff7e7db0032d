"""Words that transfers wait for, and what else a transfer may be told to wait for."""

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
    """A word of memory for which transfers wait: ``after=trigger``. `Agent.trigger` makes one.

    Its value begins at 0 and says how far something is. It is stored to by whoever has made pages final: a
    thread (`fire`), a stream or a CUDA graph (`record`), a kernel (``kvxfer/device.cuh``, `share`) or
    another process (the memory that `Agent.trigger` was given). What was written before is seen by the
    transfers that go then. One trigger serves any number of transfers of its agent; where several agents wait
    for one word, each makes a trigger over the same memory.

    All methods may be called from any thread. The word stays where it is for as long as a transfer waits for
    it, whether or not this object does.
    """

    __slots__ = ("_completions", "_word")

    def __init__(self, completions: Completions, word: Word) -> None:
        self._completions = completions
        self._word = word

    def __repr__(self) -> str:
        return f"<Trigger at {self.value}>"

    @property
    def value(self) -> int:
        """What the word holds, 0 to 2**32 - 1."""
        return self._word.value

    def share(self) -> int:
        """Returns where the word lies, 4 bytes, for kernels and for code of other languages to store to.

        Whoever stores releases, at system scope, and stores growing values. From the first call on agents
        that wait look at the word again and again instead of being woken by `fire`, and its 4 bytes are this
        trigger's until the process ends.
        """
        return self._word.share()

    def fire(self, value: int = 1) -> None:
        """Stores a value, unless the word holds more, and wakes whoever waits for it.

        Raises
        ------
        UsageError
            It is not 1 to 2**32 - 1.
        """
        self._word.fire(_value(value))

    def reset(self) -> None:
        """Sets the word to 0 for its next use. Transfers that have gone are not held back again.

        Only once everything that was to store to it has: what comes later counts as new.
        """
        self._word.reset()

    def record(self, stream: Any, value: int = 1) -> None:
        """Has a stream store a value when all that it was given before has ended.

        Parameters
        ----------
        stream
            A torch or cuda.core stream of the agent's GPU. It may be being captured: then the graph stores
            the value whenever it runs, and `reset` comes between two runs that are both waited for.
        value
            What is stored; streams store whatever the word holds, so values have to grow.

        Raises
        ------
        UsageError
            ``unsupported``: the agent has no GPU. ``invalid-argument``: no stream, or of another GPU, or the
            trigger is over a caller's memory that no GPU reaches.
        AgentError
            ``system``: the device has failed. ``closed``: the agent is.

        Notes
        -----
        One call of the driver, ``cuStreamWriteValue32``; the stream waits for nobody. Triggers are made once
        and used again: one that was ever recorded keeps its word until the process ends, since a stream may
        store to it at any time.
        """
        handle = handle_of(stream)
        if handle is None:
            raise invalid(
                f"a trigger is recorded in a torch or cuda.core stream, not in a {type(stream).__name__}"
            )
        try:
            self._completions.core.record(self._word, handle, _value(value))
        except NativeError as error:
            raise translate(error) from None

    def at(self, value: int) -> Threshold:
        """Returns what to pass as ``after=`` where all layers may go once the word holds so much.

        ``trigger`` alone means ``trigger.at(1)``. With kernels whose blocks add one each it is their number.
        """
        return Threshold(self, _value(value), 0)

    def by_layer(self, first: int = 1, step: int = 1) -> Threshold:
        """Returns what to pass as ``after=`` where layers become final one after the other.

        Parameters
        ----------
        first, step
            The k-th layer of those that the transfer moves may go once the word holds ``first + k * step``.
        """
        return Threshold(self, _value(first), _value(step))


class Threshold:
    """How far a trigger has to be; `Trigger.at` and `Trigger.by_layer` make one for ``after=``."""

    __slots__ = ("_first", "_step", "_trigger")

    def __init__(self, trigger: Trigger, first: int, step: int) -> None:
        self._trigger = trigger
        self._first = first
        self._step = step

    def __repr__(self) -> str:
        by_layer = f" and {self._step} more for each layer" if self._step else ""
        return f"<{self._trigger!r} from {self._first} on{by_layer}>"


if TYPE_CHECKING:
    #: What ``after=`` takes.
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
        raise invalid(f"memory is 4 writable bytes, as of a numpy array: {error}") from None


def resolve(completions: Completions, gpu: int, after: Any) -> After | bool:
    """Turns what a caller passes as ``after=``, a `StartsAfter`, into what holds a transfer of an agent back.

    Returns True for a future that is to let it go, False for one that has.
    """
    if isinstance(after, Trigger):
        after = after.at(1)
    if isinstance(after, Threshold):
        trigger = after._trigger
        if trigger._completions is not completions:
            instead = "make one there by trigger(), over the same memory where both are to wait for one word"
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
        "after is a Trigger, a stream or an event of torch or cuda.core, or a future, "
        f"not a {type(after).__name__}"
    )


def _check_no_capture() -> None:
    """Raises `UsageError` where torch's current stream is being captured.

    An event may be the capture's then, and the driver has no way to ask that breaks no capture.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise invalid(
            "an event is waited for while the current stream is captured into a graph, which runs later or "
            "many times: make a trigger with agent.trigger(), record() it in the stream, and wait for that"
        )


def _event(event: Any) -> int | None:
    """Returns the driver's handle of an event; None for what is none."""
    if hasattr(event, "cuda_event"):  # torch, which makes one when it is first recorded
        handle = event.cuda_event
    elif hasattr(event, "handle") and hasattr(event, "is_done"):  # cuda.core
        handle = event.handle
    else:
        return None
    if not handle or not int(handle):
        raise invalid(
            "the event was never recorded: record it in the stream that writes the pages, then pass it"
        )
    return int(handle)


def _value(value: SupportsIndex) -> int:
    return count(value, "a trigger's value", 1, _MOST)
