"""quantization: scales are read off arrays and memory, and a wrong shape is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import UsageError
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.quantization import Quantization
from kvxfer.layout.tensor import covering_spans, flatten, view

SHAPE = (3, 2, 5, 4, 2, 8)  # l2bthd
AXES = "l2bthd"


def quantized(quantization: Quantization, dtype: str = "int8") -> KVLayout:
    return KVLayout.from_tensor(np.zeros(SHAPE, np.uint8), AXES, dtype=dtype, quantization=quantization)


def test_static_scales_of_every_kind(seed: int) -> None:
    rng = np.random.default_rng(seed)
    by_layer, by_head = rng.uniform(0.1, 2, (3, 2)), rng.uniform(0.1, 2, (3, 2, 2))
    for scales, expected in (
        (Quantization.per_tensor(0.3), np.full((3, 2, 2), 0.3, np.float32)),
        (Quantization.per_layer(by_layer), np.repeat(by_layer[:, :, None], 2, 2).astype(np.float32)),
        (Quantization.per_head(by_head), by_head.astype(np.float32)),
    ):
        layout = quantized(scales)
        np.testing.assert_array_equal(scales.table(3, 2, 2), expected)
        assert not scales.in_memory
        back = KVLayout.from_bytes(layout.to_bytes())
        assert back == layout
        assert back.quantization == scales
    # Rounded once, so that both ends multiply by the same 32 bits.
    assert Quantization.per_tensor(0.1).scales == (float(np.float32(0.1)),)


def test_scales_of_many_heads_fit_the_wire() -> None:
    layout = KVLayout.from_tensor(
        np.zeros((80, 2, 1, 1, 64, 1), np.int8),
        AXES,
        quantization=Quantization.per_head(np.linspace(0.1, 1, 80 * 2 * 64).reshape(80, 2, 64)),
    )
    assert KVLayout.from_bytes(layout.to_bytes()) == layout


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize(
    ("axes", "shape"),
    [("l2b", (3, 2, 5)), ("bl2", (5, 3, 2)), ("l2bh", (3, 2, 5, 2)), ("hb2l", (2, 5, 2, 3))],
)
def test_page_scales_count_from_the_lowest_byte_of_both(
    axes: str, shape: tuple[int, ...], below: bool
) -> None:
    arena = np.zeros(16384, np.uint8)
    at, scales_at = (4096, 64) if below else (64, 4096)
    cache = arena[at : at + int(np.prod(SHAPE))].reshape(SHAPE)
    scales = arena[scales_at : scales_at + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)
    layout = KVLayout.from_tensor(
        cache, AXES, dtype="float8_e4m3fn", scales=scales, scale_axes=axes, saturate=True
    )
    q = layout.quantization
    assert q is not None
    assert (q.per, q.saturate) == ("page_head" if "h" in axes else "page", True)
    spans = covering_spans([view(item) for item in flatten([cache, scales])])
    base = spans[0][0] - view(arena).address
    assert base == 64
    assert layout.nbytes == spans[-1][0] + spans[-1][1] - spans[0][0]
    # Written through the tensors, found through the layout.
    for index in np.ndindex(*shape):
        scales[index] = sum(i * 10**n for n, i in enumerate(index)) + 0.5
        place = dict(zip(axes, index, strict=True))
        byte = (
            base
            + q.offset
            + place["l"] * q.layer_stride
            + place["2"] * q.kv_stride
            + place["b"] * q.block_stride
            + place.get("h", 0) * q.head_stride
        )
        assert arena[byte : byte + 4].view(np.float32)[0] == scales[index]
    cache[2, 1, 3, 2, 1, 5] = 77
    element = base + int(layout.layer_offsets()[2, 1]) + 3 * layout.block_stride + 2 * layout.token_stride
    assert arena[element + layout.head_stride + 5 * layout.dim_stride] == 77
    assert KVLayout.from_bytes(layout.to_bytes()) == layout


def test_scales_beside_each_page() -> None:
    # Block after block: keys and values of 4 tokens × 2 heads × 8, then their two scales.
    raw = np.zeros((5, 3, 2 * 64 + 8), np.uint8)
    cache = raw[:, :, :128].reshape(5, 3, 2, 4, 2, 8)
    assert cache.base is not None
    scales = np.ndarray((5, 3, 2), np.float32, buffer=raw.data, offset=128, strides=(408, 136, 4))
    layout = KVLayout.from_tensor(cache, "bl2thd", dtype="int8", scales=scales, scale_axes="bl2")
    assert (layout.nbytes, layout.elements_nbytes) == (5 * 408, 5 * 408 - 8)
    scales = np.ndarray((5, 3, 2), np.float32, buffer=raw.data, offset=124, strides=(408, 136, 4))
    with pytest.raises(UsageError, match="scales overlap elements"):
        KVLayout.from_tensor(cache, "bl2thd", dtype="int8", scales=scales, scale_axes="bl2")


def test_scales_of_each_layer_in_a_tensor() -> None:
    layers = list(np.zeros((3, 5, 4, 2, 16), np.int8))
    scales = np.ones((3, 5, 2), np.float32)
    layout = KVLayout.from_tensors(layers, "bthc", scales=list(scales), scale_axes="b2")
    assert layout == KVLayout.from_tensors(layers, "bthc", scales=scales, scale_axes="lb2")
    with pytest.raises(UsageError, match="at equal steps"):
        KVLayout.from_tensors(layers, "bthc", scales=[scales[0], scales[2], scales[1]], scale_axes="b2")


def test_latent_cache_needs_no_axis_for_values() -> None:
    layout = KVLayout.from_tensor(
        np.zeros((3, 5, 4, 16), np.int8), "lbtd", scales=np.ones((3, 5), np.float32), scale_axes="lb"
    )
    assert layout.quantization is not None
    assert layout.quantization.kv_stride == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Quantization.per_tensor(0.0), "above 0"),
        (lambda: Quantization.per_tensor(float("nan")), "finite"),
        (lambda: Quantization.per_tensor(1e-60), "is 0.0 as float32"),
        (lambda: Quantization.per_layer([[1.0, 1.0], [1.0, -2.0]]), "scale 3 of 4 is -2"),
        (lambda: Quantization.per_layer([1.0, 1.0]), r"shape \(2,\)"),
        (lambda: Quantization.per_head([[1.0]]), r"num_heads\], but have shape \(1, 1\)"),
        (lambda: Quantization("row", (1.0,)), "'row', not one of"),  # type: ignore[arg-type]
        (lambda: Quantization("tensor"), "has no scales"),
        (lambda: Quantization("page", (1.0,)), "reads its scales from the region"),
        (lambda: Quantization("page").table(1, 1, 1), "in the region's memory"),
    ],
)
def test_absurd_scales(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        make()
    assert caught.value.code == "invalid-argument"


@pytest.mark.parametrize(
    ("quantization", "dtype", "words"),
    [
        (Quantization.per_tensor(1.0), "uint8", "dtype uint8 cannot be scaled"),
        (
            Quantization.per_layer(np.ones((2, 3))[:, :2]),
            "int8",
            "4 scales.*6 are needed for 3 layers × 2 kv",
        ),
        (Quantization.per_head(np.ones((3, 2, 4))), "int8", "24 scales.*12 .*× 2 heads"),
        (Quantization("tensor", (1.0, 1.0)), "int8", "2 scales.*1 are needed"),
        (Quantization("page", offset=2), "int8", "offset is 2, which is not a multiple"),
        (Quantization("page", offset=4096), "int8", "scales of .*s overlap: 0 bytes"),
        (
            Quantization("page", offset=4096, layer_stride=40, kv_stride=20, block_stride=4),
            "int8",
            "",
        ),
        (
            Quantization("page", offset=4096, layer_stride=40, kv_stride=16, block_stride=4),
            "int8",
            "scales of kvs overlap: 16 bytes from one to the next, but 20 bytes",
        ),
        (
            Quantization("page", offset=960, layer_stride=40, kv_stride=20, block_stride=4),
            "int8",
            "scales overlap elements: scales lie in bytes 960 to 1079, elements in 0 to 1919",
        ),
        (Quantization("page", offset=1 << 57), "int8", "but must be 0 to"),
    ],
)
def test_scales_that_do_not_fit_the_layout(quantization: Quantization, dtype: str, words: str) -> None:
    if not words:
        assert quantized(quantization, dtype).nbytes == 4096 + 3 * 2 * 5 * 4
        return
    with pytest.raises(UsageError, match=words) as caught:
        quantized(quantization, dtype)
    assert caught.value.code == "invalid-argument"


@pytest.mark.parametrize(
    ("scales", "axes", "words"),
    [
        (np.ones((3, 2, 5)), "l2b", "float32, but tensor 0 of the scales is float64"),
        (np.ones((3, 2, 5), np.float32), "l2", "do not fit"),
        (np.ones((3, 2, 6), np.float32), "l2b", "6 along axis b, but the layout has 5 blocks"),
        (np.ones((3, 2, 5, 3), np.float32), "l2bh", "3 along axis h, but the layout has 2 heads"),
        ([], "l2b", "empty list"),
        (None, "l2b", "no scales were given"),
        ([np.ones((1, 2, 5), np.float32)] * 3, "l2b", "cannot have axis l"),
        ([np.ones((2, 5), np.float32), np.ones((2, 6), np.float32)], "2b", "scales of layer 1"),
    ],
)
def test_scale_tensors_that_do_not_fit(scales: Any, axes: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        KVLayout.from_tensor(np.zeros(SHAPE, np.int8), AXES, scales=scales, scale_axes=axes)
    assert caught.value.code == "invalid-argument"


def test_scales_and_a_quantization_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="pass only one of the two"):
        KVLayout.from_tensor(
            np.zeros(SHAPE, np.int8),
            AXES,
            scales=np.ones((3, 2, 5), np.float32),
            scale_axes="l2b",
            quantization=Quantization.per_tensor(1.0),
        )


@pytest.mark.parametrize("scale", [None, "a", [1.0], b"a"])
def test_a_scale_is_a_number(scale: Any) -> None:
    with pytest.raises(UsageError, match=r"^scale must be a number above 0, not "):
        Quantization.per_tensor(scale)
