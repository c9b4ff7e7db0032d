"""Caches that no copy program bridges are refused when agents connect, in words, at both ends."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from tests.waiting import until

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from kvxfer import Agent, KVLayout, UsageError
from kvxfer.layout.quantization import Quantization

ARRAY = np.zeros((2, 2, 8, 16, 4, 32), np.uint16)
LLAMA = replace(KVLayout.from_tensor(ARRAY, "l2bthd", dtype="bfloat16"), model="llama")
MLA = KVLayout.from_tensor(ARRAY.reshape(2, 16, 16, 128), "lbtd", dtype="bfloat16")
OPAQUE = KVLayout.from_tensor(ARRAY.reshape(2, 8, -1), "lbd", dtype="opaque")


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (replace(LLAMA, model="qwen"), "model: llama"),
        (KVLayout.from_tensor(ARRAY, "l2bthd", dtype="float64x"), "dtype: bfloat16"),
        (KVLayout.from_tensor(ARRAY.reshape(2, 2, 8, 16, 8, 16), "l2bthd", dtype="bfloat16"), "head_dim: 32"),
        (KVLayout.from_tensor(ARRAY[:1], "l2bthd", dtype="bfloat16"), "layers of the model: 2"),
        (MLA, "keys and values: told apart"),
        (OPAQUE, "dtype: bfloat16"),
    ],
)
def test_caches_that_differ_for_good_are_refused_at_connect(theirs: KVLayout, words: str) -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        prefill.register("kv", ARRAY, LLAMA)
        region = decode.register("kv", ARRAY, theirs)
        with pytest.raises(UsageError) as caught:
            prefill.connect_blocking(decode.address, 10)
        assert caught.value.code == "layout-mismatch"
        assert words in str(caught.value), caught.value
        assert not prefill.peers
        # The agents stay usable: with the region gone they connect.
        region.deregister_blocking()
        peer = prefill.connect_blocking(decode.address, 10)
        assert peer.state == "open"


def test_the_end_that_was_called_reads_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvxfer")
    with Agent("prefill") as prefill, Agent("decode") as decode:
        prefill.register("kv", ARRAY, LLAMA)
        decode.register("kv", ARRAY, replace(LLAMA, model="qwen"))
        with pytest.raises(UsageError):
            prefill.connect_blocking(decode.address, 10)
        until(lambda: not decode.poll() and "decode lost a peer" in caplog.text, lambda: caplog.text)
    assert "model: llama at the source, qwen at the destination" in caplog.text


@pytest.mark.parametrize(
    "theirs",
    [
        KVLayout.from_tensor(ARRAY.reshape(2, 2, 8, 4, 16, 32), "l2bhtd", dtype="bfloat16"),
        replace(LLAMA, dtype="float16", quantization=Quantization.per_tensor(0.5)),
        replace(LLAMA, model=""),
    ],
    ids=["another order", "another dtype", "model not said"],
)
def test_caches_that_a_program_bridges_connect(theirs: KVLayout) -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        prefill.register("kv", ARRAY, LLAMA)
        decode.register("kv", ARRAY, theirs)
        assert prefill.connect_blocking(decode.address, 10).state == "open"


def test_regions_of_other_names_are_not_compared() -> None:
    with Agent("prefill") as prefill, Agent("decode") as decode:
        prefill.register("kv", ARRAY, LLAMA)
        decode.register("draft", ARRAY, MLA)
        assert prefill.connect_blocking(decode.address, 10).state == "open"
