"""Loads that a forward waits for, layer by layer."""

from __future__ import annotations

import threading

import numpy as np

from tests.connectors.workers import LAYERS, Pushed, some_tokens, workers

TOKENS = 100


def test_a_forward_waits_for_the_layer_that_it_needs_and_no_other() -> None:
    pushed, whole = Pushed.draw("layers", TOKENS), some_tokens(TOKENS)
    with workers("prefill") as prefill, workers("decode") as decode:
        prefill[0].half.before_forward(pushed.chunk(0, TOKENS))
        has_computed = [threading.Event() for _ in LAYERS]
        may_go_on = [threading.Event() for _ in LAYERS]

        def compute() -> None:
            for layer, name in enumerate(LAYERS):
                while not may_go_on[layer].wait(0.01):
                    prefill[0].half.collect(set())  # reads decode's registration
                pushed.compute(prefill, layer, 0, TOKENS, whole)
                has_computed[layer].set()
                prefill[0].half.layer_done(name)
            prefill[0].half.after_forward(whole=True)

        forward = threading.Thread(target=compute)
        forward.start()
        decode[0].half.step(pushed.order(prefill, waits=True))
        for layer, name in enumerate(LAYERS):
            assert not has_computed[layer].is_set()
            may_go_on[layer].set()
            decode[0].half.wait_for_layer(name)
            assert np.array_equal(pushed.arrived(decode, layer), whole[layer])
        forward.join(20)
        results = decode[0].half.collect(set())
        # The load is not reported, because the request already runs.
        assert not results.received
        assert not results.failed


def test_what_did_not_arrive_is_told_with_its_step() -> None:
    pushed = Pushed.draw("gone", TOKENS)
    with workers("prefill") as prefill, workers("decode", load_timeout_s=1.0, push_timeout_s=1.0) as decode:
        decode[0].half.step(pushed.order(prefill, waits=True))
        for name in LAYERS:
            decode[0].half.wait_for_layer(name)
        results = decode[0].half.collect(set())
        assert not results.received
        assert results.failed == {"gone": set(pushed.dst)}
