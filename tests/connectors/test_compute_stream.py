"""Worker halves of engines whose kernels run after their forward has returned, as on a GPU.

The stream here runs its work when a test says so. Until then, pages that the work computes or overwrites must
not be read, and no bytes may land in them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import kvxfer
from kvxfer.connectors.common import compute_stream
from kvxfer.connectors.common.handover import Handover
from kvxfer.connectors.common.step import FetchOrder, Grant, Step
from tests.connectors.workers import (
    BLOCK_SIZE,
    LAYERS,
    Array,
    Pushed,
    Worker,
    collected,
    prefill_knows,
    some_tokens,
    workers,
)
from tests.waiting import until

TOKENS = 100
#: The time in which an error would have happened. Correct behaviour does not depend on it.
_MOMENT_S = 0.1


class LateStream:
    """Runs its work in the order in which it was given, when a test says so."""

    def __init__(self) -> None:
        self._given: deque[tuple[str, Callable[[], None]]] = deque()

    def give(self, work: Callable[[], None]) -> None:
        self._given.append(("work", work))

    def record(self, trigger: kvxfer.Trigger, value: int) -> None:
        self._given.append(("record", partial(trigger.fire, value)))

    def hold(self, work: kvxfer.Group, layer: int) -> bool:
        def wait() -> None:
            try:
                work.layer_blocking(layer, 20)
            except kvxfer.KvxferError:
                pass  # a stream goes on

        self._given.append(("hold", wait))
        return True

    def run(self) -> None:
        while self._given:
            self._given.popleft()[1]()

    def run_to_record(self) -> None:
        """Runs up to the first value that it stores after some work."""
        kinds: list[str] = []
        while kinds[-2:] != ["work", "record"]:
            kind, work = self._given.popleft()
            work()
            kinds.append(kind)


def late_forward(
    stream: LateStream,
    prefill: list[Worker],
    pushed: Pushed,
    first: int,
    stop: int,
    whole: Array,
    succeeds: bool = True,
) -> None:
    """Does the processor's part of one step that computes a chunk: the kernels are queued in the stream."""
    prefill[0].half.before_forward(pushed.chunk(first, stop))
    for layer, name in enumerate(LAYERS):
        stream.give(partial(pushed.compute, prefill, layer, first, stop, whole))
        prefill[0].half.layer_done(name)
    prefill[0].half.after_forward(succeeds)
    prefill[0].half.collect(set())


def step_for_a_moment(*sides: list[Worker]) -> None:
    """Steps engines that have nothing to compute, and asserts that they report nothing."""
    deadline = time.monotonic() + _MOMENT_S
    while time.monotonic() < deadline:
        for side in sides:
            results = side[0].half.collect(set())
            assert not results.received
            assert not results.sent
            side[0].half.before_forward(Step())
            side[0].half.after_forward(True)
            side[0].half.step(Step())


def assert_arrived(pushed: Pushed, decode: list[Worker], whole: Array) -> None:
    for layer in range(len(LAYERS)):
        assert np.array_equal(pushed.arrived(decode, layer), whole[layer])


@pytest.mark.parametrize("registers", ["first", "between", "last"])
def test_what_is_pushed_waits_for_the_stream(registers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every third step's end gets new words of the stream's memory.
    monkeypatch.setattr(compute_stream, "_MOST", 7)
    stream, whole = LateStream(), some_tokens(TOKENS)
    pushed = Pushed.draw("late", TOKENS)
    with workers("prefill", stream=stream) as prefill, workers("decode") as decode:
        chunks = ((0, 32), (32, 40), (40, 70), (70, TOKENS))
        for at, chunk in enumerate(chunks):
            if at == {"first": 0, "between": 2}.get(registers):
                decode[0].half.step(pushed.order(prefill))
            late_forward(stream, prefill, pushed, *chunk, whole)
        if registers == "last":
            decode[0].half.step(pushed.order(prefill))
        step_for_a_moment(prefill, decode)
        assert not any(cache.any() for cache in decode[0].caches.values())
        stream.run()
        results = step_until_received(prefill, decode, pushed.name)
        assert not results
        assert_arrived(pushed, decode, whole)


def step_until_received(prefill: list[Worker], decode: list[Worker], name: str) -> dict[str, set[int]]:
    """Steps both until decode has the request; returns the failed ones."""
    failed: dict[str, set[int]] = {}

    def has_ended() -> bool:
        prefill[0].half.collect(set())
        results = decode[0].half.collect(set())
        failed.update(results.failed)
        return name in results.received

    until(has_ended, f"{name} at decode")
    return failed


def test_a_layer_goes_when_the_stream_has_computed_it() -> None:
    stream, whole = LateStream(), some_tokens(TOKENS)
    pushed = Pushed.draw("layers", TOKENS)
    with workers("prefill", stream=stream) as prefill, workers("decode") as decode:
        decode[0].half.step(pushed.order(prefill))
        until(partial(_is_registered, prefill, decode, pushed), "a registration at prefill")
        late_forward(stream, prefill, pushed, 0, TOKENS, whole)
        for layer in range(len(LAYERS)):
            stream.run_to_record()
            until(partial(_is_there, prefill, decode, pushed, layer, whole), f"layer {layer} at decode")
            for later in range(layer + 1, len(LAYERS)):
                assert not pushed.arrived(decode, later).any()


def _is_registered(prefill: list[Worker], decode: list[Worker], pushed: Pushed) -> bool:
    decode[0].half.collect(set())  # dials, and then sends it
    return prefill_knows(prefill, pushed)


def _is_there(prefill: list[Worker], decode: list[Worker], pushed: Pushed, layer: int, whole: Array) -> bool:
    prefill[0].half.collect(set())
    return bool(np.array_equal(pushed.arrived(decode, layer), whole[layer]))


def test_a_forward_that_failed_lets_no_layer_of_the_next_go() -> None:
    stream, whole, other = LateStream(), some_tokens(TOKENS, 1), some_tokens(TOKENS, 2)
    fails = Pushed.draw("fails", TOKENS, seed=1)
    goes_on = Pushed.draw("goes on", TOKENS, seed=2, beside=fails)
    with workers("prefill", stream=stream) as prefill, workers("decode") as decode:
        decode[0].half.step(fails.order(prefill))
        late_forward(stream, prefill, fails, 0, TOKENS, whole, succeeds=False)
        failed = step_until_received(prefill, decode, fails.name)
        assert failed == {fails.name: set(fails.dst)}
        decode[0].half.step(goes_on.order(prefill))
        for cache in prefill[0].caches.values():
            cache[list(goes_on.src)] = -1
        # All that the first step has recorded is stored before the second computes.
        stream.run()
        late_forward(stream, prefill, goes_on, 0, TOKENS, other)
        step_for_a_moment(prefill, decode)
        assert not goes_on.arrived(decode, 0).any()
        stream.run()
        assert not step_until_received(prefill, decode, goes_on.name)
        assert_arrived(goes_on, decode, other)


def test_a_push_whose_stream_never_comes_to_it_ends_by_its_deadline() -> None:
    stream, whole = LateStream(), some_tokens(TOKENS)
    pushed = Pushed.draw("stuck", TOKENS)
    with (
        workers("prefill", stream=stream, load_timeout_s=1.0, lease_ttl_s=2.0) as prefill,
        workers("decode", load_timeout_s=1.0, push_timeout_s=3.0) as decode,
    ):
        decode[0].half.step(pushed.order(prefill))
        late_forward(stream, prefill, pushed, 0, TOKENS, whole)
        assert step_until_received(prefill, decode, pushed.name) == {pushed.name: set(pushed.dst)}
        # And its blocks come back.
        (results,) = collected(prefill, {pushed.name})
        assert results.sent == {pushed.name}
        stream.run()
        assert not any(cache.any() for cache in decode[0].caches.values())


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_forward_that_loads_synchronously_waits_in_its_stream(is_lost: bool) -> None:
    stream, whole = LateStream(), some_tokens(TOKENS)
    pushed = Pushed.draw("held", TOKENS)
    with workers("prefill") as prefill, workers("decode", stream=stream) as decode:
        for layer in range(len(LAYERS)):
            pushed.compute(prefill, layer, 0, TOKENS, whole)
        source = granted(prefill, pushed)
        order = FetchOrder(pushed.name, source, (pushed.dst,), 0, TOKENS, waits=True)
        decode[0].half.step(Step(fetches=[order]))
        seen: list[Array] = []

        def look(layer: int) -> None:
            seen.append(pushed.arrived(decode, layer).copy())

        for layer, name in enumerate(LAYERS):
            # Nothing of it goes before the stream has come to where it was ordered.
            decode[0].half.wait_for_layer(name)
            stream.give(partial(look, layer))
        if is_lost:
            prefill[0].half.sleep()
        stream.run()
        results = decode[0].half.collect(set())
        assert not results.received
        assert results.failed == ({pushed.name: set(pushed.dst)} if is_lost else {})
        if not is_lost:
            for layer in range(len(LAYERS)):
                assert np.array_equal(seen[layer], whole[layer])


def granted(prefill: list[Worker], pushed: Pushed) -> Handover:
    """Returns the handover of a request whose blocks prefill keeps."""
    lease = kvxfer.LeaseToken.draw()
    prefill[0].half.step(Step(grants=[Grant(pushed.name, (lease,), (pushed.src,))]))
    return Handover(pushed.name, (prefill[0].rank,), (lease,), (pushed.src,), (BLOCK_SIZE,), (1,), TOKENS)


@pytest.mark.parametrize("how", ["pull", "push"])
def test_kernels_of_who_had_the_blocks_before_do_not_write_over_what_arrives(how: str) -> None:
    stream, whole = LateStream(), some_tokens(TOKENS)
    pushed = Pushed.draw("behind", TOKENS)
    with workers("prefill") as prefill, workers("decode", stream=stream) as decode:

        def overwrite() -> None:
            for cache in decode[0].caches.values():
                cache[list(pushed.dst)] = -1

        for layer in range(len(LAYERS)):
            pushed.compute(prefill, layer, 0, TOKENS, whole)
        stream.give(overwrite)
        if how == "pull":
            source = granted(prefill, pushed)
            order = Step(fetches=[FetchOrder(pushed.name, source, (pushed.dst,), 0, TOKENS)])
            decode[0].half.step(order)
        else:
            decode[0].half.step(pushed.order(prefill))
            prefill[0].half.before_forward(pushed.chunk(0, TOKENS))
            for name in LAYERS:
                prefill[0].half.layer_done(name)
            prefill[0].half.after_forward(True)
        step_for_a_moment(prefill, decode)
        stream.run()
        assert not step_until_received(prefill, decode, pushed.name)
        assert_arrived(pushed, decode, whole)
