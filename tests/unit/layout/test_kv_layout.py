"""layout: engines' caches are read as they are; impossible layouts are refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout


def test_a_dtype_may_have_a_short_name_or_be_a_librarys() -> None:
    named: Any
    for named, name in (
        ("bf16", "bfloat16"),
        ("half", "float16"),
        (np.float16, "float16"),
        ("opaque", "opaque"),
    ):
        cache = np.zeros((3, 8, 16, 576), np.uint16)
        assert KVLayout.from_tensor(cache, "lbtd", dtype=named).dtype == name
        assert KVLayout.from_tensors(list(cache), "btd", dtype=named).dtype == name
    assert KVLayout.from_tensor(np.zeros((8, 64), np.uint8), "bd", dtype="fp8").dtype == "float8_e4m3fn"
    with pytest.raises(UsageError, match="an element of float32 has 4 bytes, but itemsize is 2"):
        KVLayout.from_tensor(np.zeros((8, 64), np.uint16), "bd", dtype="fp32")


def test_keys_and_values_of_all_layers_apart() -> None:
    arena = np.zeros((2, 3, 8, 16, 4, 32), np.float16)
    together = KVLayout.from_tensor(arena, "2lbthd")
    assert KVLayout.from_tensors([arena[0], arena[1]], "lbthd") == together
    pairs = {f"layer.{i}": (arena[0, i], arena[1, i]) for i in range(3)}
    assert KVLayout.from_tensors(pairs, "bthd") == together
    assert KVLayout.from_tensors([{"k": k, "v": v} for k, v in pairs.values()], "bthd") == together


def test_values_below_keys_are_listed() -> None:
    arena = np.zeros((2, 3, 8, 16, 4, 32), np.float16)
    layout = KVLayout.from_tensors([arena[1], arena[0]], "lbthd")
    assert len(layout.offsets) == 6
    assert layout.layer_offsets()[0, 0] > layout.layer_offsets()[0, 1] == 0


@pytest.mark.parametrize("what", ["head", "layer"])
def test_a_slice_needs_the_total_of_its_model(what: str) -> None:
    tensor = np.zeros((2, 2, 4, 8, 4, 16), np.float16)
    held: dict[str, Any] = {f"first_{what}": 2}
    with pytest.raises(UsageError, match=rf"first_{what}=2 .* pass total_{what}s=") as caught:
        KVLayout.from_tensor(tensor, "l2bthd", **held)
    assert caught.value.code == "invalid-argument"
    held[f"total_{what}s"] = 8
    assert getattr(KVLayout.from_tensor(tensor, "l2bthd", **held), f"total_{what}s") == 8


@pytest.mark.parametrize(
    ("shape", "axes", "words"),
    [
        ((2, 3), "bdh", "3 axes"),
        ((2, 3), "bx", "unknown"),
        ((2, 3), "bb", "twice"),
        ((2, 3), "lt", "need b"),
        ((2, 3, 4), "bdc", "need b"),
        ((3, 2, 4), "2bd", "3 elements"),
        ((2, 2, 4), "2bc", "both c and 2"),
        ((2, 3), "bc", "3 elements"),
        ((0, 3), "bd", "empty"),
    ],
)
def test_axes_that_do_not_fit(shape: tuple[int, ...], axes: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        KVLayout.from_tensor(np.zeros(shape), axes)
    assert caught.value.code == "invalid-argument"


def test_what_memory_does_not_tell_is_kept() -> None:
    layout = KVLayout.from_tensor(
        np.zeros((2, 2, 4, 8, 4, 16), np.float16),
        "l2bthd",
        first_layer=np.int64(6),  # type: ignore[arg-type]
        total_layers=8,
        null_block=0,
        cp_rank=1,
        cp_size=4,
        cp_interleave=16,
        model="org/model",
        group="sliding",
    )
    assert (layout.null_block, layout.cp_rank, layout.cp_size, layout.cp_interleave) == (0, 1, 4, 16)
    assert (layout.model, layout.group, layout.heads) == ("org/model", "sliding", range(4))
    assert KVLayout.from_bytes(layout.to_bytes()) == layout
    with pytest.raises(UsageError, match="first_layer is a float, not an integer"):
        replace(layout, first_layer=1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="offsets is a tuple, not a tuple of integers"):
        replace(layout, offsets=(0.5,))  # type: ignore[arg-type]


def test_strides_are_of_whole_elements() -> None:
    raw = np.zeros(4096, np.uint8)
    tokens = np.ndarray((4, 8), np.float16, buffer=raw.data, strides=(17, 2))
    with pytest.raises(UsageError, match="blocks are 17 bytes apart, which is not a multiple of the 2 bytes"):
        KVLayout.from_tensor(tokens, "bd")
    layers = [np.ndarray((4, 8), np.float16, buffer=raw.data, offset=at) for at in (0, 65, 130)]
    with pytest.raises(UsageError, match="layers are 65 bytes apart"):
        KVLayout.from_tensors(layers, "bd")
    with pytest.raises(UsageError, match="a layer begins at byte 65"):
        KVLayout.from_tensors([layers[0], layers[2], layers[1]], "bd")


def test_layers_that_meet_in_later_blocks() -> None:
    # Neighbours are 150 bytes apart and 100 long, but layer 2 is where block 1 of layer 0 is.
    layout = KVLayout.from_tensor(np.zeros((3, 4, 100), np.uint8), "lbd")
    layout = replace(layout, layer_stride=0, block_stride=300, offsets=(0, 110, 1300))
    assert layout.nbytes == 1300 + 3 * 300 + 100
    with pytest.raises(UsageError, match="layer 0 kv 0 at byte 0 and layer 2 kv 0 at byte 300 share bytes"):
        replace(layout, offsets=(0, 150, 300))


def test_flipped_tensors_name_their_axis() -> None:
    with pytest.raises(UsageError, match="axis 1, of 4 elements, has a stride of -8"):
        KVLayout.from_tensor(np.zeros((2, 4, 8), np.uint8)[:, ::-1], "bhd")


def test_lists_that_do_not_fit() -> None:
    one = np.zeros((4, 8), np.uint8)
    for tensors, axes in (
        ([], "bd"),
        ([one, np.zeros((4, 9), np.uint8)], "bd"),
        ([one, one.view(np.int8)], "bd"),
        ([(one, one.copy(), one)], "bd"),
        ([(one, one.copy()), one], "bd"),
        ([(np.zeros((2, 4, 8)), np.zeros((2, 4, 8)))], "2bd"),
        ([one, one], "bd"),
    ):
        with pytest.raises((UsageError, TypeError)):
            KVLayout.from_tensors(tensors, axes)


def damaged(**changes: Any) -> bytes:
    values = json.loads(KVLayout.from_tensor(np.zeros((4, 2, 3), np.uint8), "lbd").to_bytes())
    for name, value in changes.items():
        if value is None:
            values.pop(name, None)
        else:
            values[name] = value
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b"[" * 50_000, "not JSON"),
        (b" " * 70_000, "over the bound"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"kvxfer_layout":NaN}', "version"),
        (damaged(kvxfer_layout=None), "no version: field kvxfer_layout is None"),
        (damaged(kvxfer_layout=0), "no version"),
        (damaged(itemsize=None, itemsiye=1), "lacks itemsize .and has unknown itemsiye"),
        (damaged(num_blocks="2"), "not an integer"),
        (damaged(num_blocks=0), "num_blocks is 0"),
        (damaged(num_kv=3), "num_kv"),
        (damaged(block_stride=1), "overlap"),
        (damaged(dtype="x" * 33), "dtype"),
        (damaged(offsets=[0]), "1 offsets"),
        (damaged(offsets=[0, 9, 18, 20], layer_stride=0), "overlap"),
        (damaged(first_layer=1), "not within"),
        (damaged(num_blocks=1 << 31, block_stride=1 << 50), "limit"),
        (damaged(dtype="float16"), "an element of float16 has 2 bytes, but itemsize is 1"),
        (damaged(dtype="a\n"), "printable"),
        (damaged(model="x" * 257), "model"),
        (damaged(model="\ud800"), "model"),
        (damaged(null_block=2), "null_block is 2, but the blocks are 0 to 1"),
        (damaged(cp_size=5000), "cp_size is 5000, but must be 1 to 4096"),
        (damaged(cp_rank=2, cp_size=2), "cp_rank is 2, but the ranks of cp_size 2 are 0 to 1"),
        (damaged(cp_size=4096, cp_interleave=1 << 30), "tokens exceed"),
        (damaged(quantization=None, needs=["quantization"]), "needs quantization, but has no such"),
        (damaged(quantization={}), "lacks quantization.per"),
        (damaged(quantization={"per": "tensor", "scales": "AAA"}), "quantization.scales is not base64"),
        (damaged(quantization={"per": "tensor", "scales": "AACAPw=="}), "dtype uint8 cannot be scaled"),
        (damaged(quantization={"per": "tensor", "scales": "AADAfw=="}, dtype="int8"), "is nan as float32"),
        (damaged(quantization={"per": "page", "offset": "4"}), "quantization.offset is a str"),
    ],
)
def test_bytes_from_elsewhere_are_refused(encoded: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        KVLayout.from_bytes(encoded)
    assert caught.value.code == "invalid-argument"


def test_too_many_listed_offsets_are_refused_when_sent(seed: int) -> None:
    order = np.random.default_rng(seed).permutation(8000)
    layout = KVLayout(
        dtype="u1",
        itemsize=1,
        num_blocks=1,
        block_tokens=1,
        num_kv=2,
        head_dim=1,
        first_layer=0,
        num_layers=4000,
        total_layers=4000,
        first_head=0,
        num_heads=1,
        total_heads=1,
        block_stride=0,
        token_stride=0,
        head_stride=0,
        dim_stride=0,
        offsets=tuple(int(i) << 40 for i in order),
    )
    with pytest.raises(UsageError, match="in one tensor"):
        layout.to_bytes()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"axes": 5}, "axes must be a text with a letter for each axis"),
        ({"axes": None}, "axes must be a text with a letter for each axis"),
        ({"first_layer": "0"}, "layout field first_layer is a str, not an integer"),
        ({"first_head": None}, "layout field first_head is a NoneType, not an integer"),
        ({"quantization": 0.5}, "layout field quantization is a float, not a Quantization"),
    ],
)
def test_what_is_of_another_kind_is_refused_by_its_name(fields: dict[str, Any], words: str) -> None:
    values: dict[str, Any] = {"axes": "lbthd", "dtype": "float16", **fields}
    with pytest.raises(UsageError, match=f"^{words}"):
        KVLayout.from_tensor(np.zeros((2, 4, 2, 2, 8), np.float16), **values)
