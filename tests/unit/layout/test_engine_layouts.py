"""engine_layouts: every element is where the engine's own tensor has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer.errors import UsageError
from kvxfer.layout.engine_layouts import VLLM_ORDERS, Values, opaque_rows, sglang, trtllm, vllm, vllm_group
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.slices import heads_of, layers_of

L, B, H, N, D = 3, 5, 2, 4, 8


@dataclass
class Tensor:
    """What vLLM's KVCacheTensor shows."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class Spec:
    block_size: int = N
    num_kv_heads: int = H
    head_size: int = D
    dtype: Any = "float16"


@dataclass
class ValuesApart(Spec):
    head_size_v: int = 4


@dataclass
class State:
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    block_size: int = 160


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class Specs:
    kv_cache_specs: dict[str, Any]


@dataclass
class Config:
    num_blocks: int
    kv_cache_tensors: list[Tensor]
    kv_cache_groups: list[Group]
    kv_cache_layout: str | None = None


def check(raw: NDArray[Any], layout: KVLayout, logical: NDArray[Any]) -> None:
    """Numbers `logical`, a view [l, kv, b, t, h, d] of `raw`, and reads it back through the layout."""
    raw = raw.reshape(-1).view(np.uint8)
    assert np.shares_memory(raw, logical)
    logical[...] = np.arange(logical.size).reshape(logical.shape)
    assert (layout.num_layers, layout.num_kv) == logical.shape[:2]
    shape = (layout.num_blocks, layout.block_tokens, layout.num_heads, layout.head_dim)
    assert shape == logical.shape[2:]
    strides = (layout.block_stride, layout.token_stride, layout.head_stride, layout.dim_stride)
    for index in np.ndindex(*logical.shape[:2]):
        at = int(layout.layer_offsets()[index])
        here = np.ndarray(shape, logical.dtype, buffer=raw.data, offset=at, strides=strides)
        np.testing.assert_array_equal(here, logical[index])
    assert layout.nbytes == len(raw)


def physical(order: str, sizes: dict[str, int], dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros([sizes[letter] for letter in order], dtype)


def described(cache: NDArray[Any], order: str, num_layers: int) -> Tensor:
    return Tensor(
        cache.nbytes,
        [f"layers.{i}" for i in range(num_layers)],
        cache.strides[order.index("L")],
        cache.strides[order.index("B")],
    )


@pytest.mark.parametrize("order", VLLM_ORDERS)
@pytest.mark.parametrize("values", ["row", "heads", "plane"])
def test_vllm_orders(order: str, values: Values) -> None:
    sizes = {"L": L, "B": B, "H": H * (2 if values == "heads" else 1), "N": N, "C": D}
    if values != "heads":
        sizes["C"] *= 2
    cache = physical(order, sizes)
    tensor = described(cache, order, L)
    spec = Spec(dtype="float32")
    if values == "plane" and not order.endswith("NC"):
        with pytest.raises(UsageError, match="do not fit order"):
            vllm(tensor, spec, order, num_blocks=B, values=values)
        return
    layout = vllm(tensor, spec, order, num_blocks=B, values=values)
    logical = cache.transpose([order.index(letter) for letter in "LBNHC"])
    if values == "row":
        logical = logical.reshape(L, B, N, H, 2, D).transpose(0, 4, 1, 2, 3, 5)
    elif values == "heads":
        logical = logical.reshape(L, B, N, 2, H, D).transpose(0, 3, 1, 2, 4, 5)
    else:  # [.., H, N, C] holds [.., H, 2, N, D]
        rest = cache.shape[:-2]
        split = cache.reshape(*rest, 2, N, D)
        names = order[:-2] + "2ND"
        logical = split.transpose([names.index(letter) for letter in "L2BNHD"])
    check(cache, layout, logical)
    assert layout.null_block == 0
    if values == "row":
        # The worker's own tensors [B, H, N, C] give the same layout.
        views = list(cache.transpose([order.index(letter) for letter in "LBHNC"]))
        assert KVLayout.from_tensors(views, "bhtc", null_block=0) == layout


def test_vllm_latent_is_one_head_on_every_rank() -> None:
    cache = np.zeros((L, B, 1, N, 576), np.float16)
    spec = Spec(num_kv_heads=1, head_size=576)
    layouts = [vllm(described(cache, "LBHNC", L), spec, "LBHNC", num_blocks=B, latent=True) for _ in range(2)]
    assert layouts[0] == layouts[1] == KVLayout.from_tensor(cache, "lbhtd", null_block=0)
    assert (layouts[0].num_kv, layouts[0].total_heads, layouts[0].head_dim) == (1, 1, 576)


def test_vllm_values_of_another_size_are_one_row() -> None:
    cache = np.zeros((L, B, H, N, 12), np.float16)
    layout = vllm(described(cache, "LBHNC", L), ValuesApart(), "LBHNC", num_blocks=B)
    assert layout == KVLayout.from_tensor(cache, "lbhtd", null_block=0)


def test_vllm_fp8_in_bytes_and_padded_pages() -> None:
    page = 2 * H * N * D
    raw = np.zeros((L, B, page + 96), np.uint8)
    tensor = Tensor(raw.nbytes, ["a", "b", "c"], raw.strides[0], raw.strides[1])
    layout = vllm(tensor, Spec(dtype=np.uint8), "LBNHC", num_blocks=B, dtype="float8_e4m3fn")
    assert vllm(tensor, Spec(dtype=np.uint8), "LBNHC", num_blocks=B, dtype="fp8") == layout
    cache = raw[:, :, :page].reshape(L, B, N, H, 2 * D)
    assert layout == KVLayout.from_tensor(cache, "lbthc", dtype="float8_e4m3fn", null_block=0)
    assert layout.block_stride == page + 96


def test_vllm_state_is_an_opaque_padded_row() -> None:
    tensor = Tensor(4 * 7 * 81920, ["a", "b", "c", "d"], 7 * 81920, 81920)
    spec = State(shapes=((3, 1024), (8, 128, 15)), dtypes=("bfloat16", np.float32))
    layout = vllm(tensor, spec, "LBHNC", num_blocks=7, first_head=1, total_heads=4, group="mamba")
    assert (layout.dtype, layout.itemsize, layout.block_tokens) == ("opaque", 1, 1)
    assert layout.head_dim == 3 * 1024 * 2 + 8 * 128 * 15 * 4
    assert (layout.block_stride, layout.num_kv, layout.heads) == (81920, 1, range(1, 2))


def hybrid() -> Config:
    """Two kinds of layers over one allocation, block-outermost; the second kind has longer rows."""
    page = 2 * H * N * D * 2
    packed = 2 * page
    return Config(
        num_blocks=B,
        kv_cache_tensors=[
            Tensor(B * packed, ["full.0", "full.1"], page, packed),
            Tensor(B * packed, ["sliding.0", "sliding.1"], page, packed),
            Tensor(B * packed, ["state.0"], packed, packed),
        ],
        kv_cache_groups=[
            Group(["full.0", "full.1"], Spec()),
            Group(["sliding.1", "sliding.0"], Specs({"sliding.0": Spec(), "sliding.1": Spec()})),
            Group(["state.0"], State(((100,),), ("float32",))),
        ],
        kv_cache_layout="BLHNC",
    )


def test_vllm_groups_share_an_allocation() -> None:
    config = hybrid()
    full, sliding, state = (
        vllm_group(config, index, group=name) for index, name in enumerate(["full", "sliding", "mamba"])
    )
    assert (full.layers, full.group, full.null_block) == (range(2), "full", 0)
    assert full.layer_offsets().tolist() == [[0, 16], [256 * 1, 256 + 16]]
    # In the order of the group, not of the tensor; only ascending strides are regular.
    assert sliding.layer_offsets().tolist() == full.layer_offsets()[::-1].tolist()
    assert len(sliding.offsets) == 4
    assert (state.head_dim, state.block_stride, state.dtype) == (400, full.block_stride, "opaque")


def test_vllm_groups_that_no_layout_has() -> None:
    config = hybrid()
    config.kv_cache_groups[1].kv_cache_spec.kv_cache_specs["sliding.0"] = Spec(head_size=4)
    with pytest.raises(UsageError, match=r"sliding\.0 of group 1 has another spec"):
        vllm_group(config, 1)
    config.kv_cache_groups[0].layer_names.append("lost")
    with pytest.raises(UsageError, match="lost of group 0"):
        vllm_group(config, 0)
    config.kv_cache_layout = None
    with pytest.raises(UsageError, match="pass order="):
        vllm_group(config, 0)
    mixed = Config(
        B,
        [Tensor(1 << 20, ["a"], 0, 512), Tensor(1 << 20, ["b"], 0, 1024, 1 << 16)],
        [Group(["a", "b"], Spec())],
    )
    with pytest.raises(UsageError, match="layers of one region must be alike"):
        vllm_group(mixed, 0, "LBHNC")


@pytest.mark.parametrize(
    ("tensor", "order", "words"),
    [
        (Tensor(1 << 20, ["a", "b"], 4096, 512), "LBNCH", "not one of LBHNC"),
        (Tensor(1 << 20, ["a", "b"], 4096, 200), "LBHNC", "blocks overlap: 200 bytes"),
        (Tensor(1 << 20, ["a", "b"], 512, 512), "LBHNC", "overlap: 512 bytes"),
        (Tensor(5000, ["a", "b"], 4096, 512), "LBHNC", "end at byte 6400, but the tensor has 5000"),
    ],
)
def test_vllm_descriptions_that_do_not_fit(tensor: Tensor, order: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        vllm(tensor, Spec(), order, num_blocks=B)
    assert caught.value.code == "invalid-argument"


def test_sglang_has_keys_and_values_apart() -> None:
    buffers = np.zeros((2, L, B * N, H, D), np.float16)  # [kv, layer, token, head, dim]
    pointers = [item.ctypes.data for kv in buffers for item in kv]
    layout = sglang(
        pointers,
        [buffers[0, 0].nbytes] * 2 * L,
        [N * H * D * 2] * 2 * L,
        page_size=N,
        num_heads=H,
        head_dim=D,
        dtype="float16",
    )
    logical = buffers.reshape(2, L, B, N, H, D).transpose(1, 0, 2, 3, 4, 5)
    check(buffers, layout, logical)
    pairs = [(buffers[0, i].reshape(B, N, H, D), buffers[1, i].reshape(B, N, H, D)) for i in range(L)]
    assert layout == KVLayout.from_tensors(pairs, "bthd")


def test_sglang_as_seen_and_in_any_place() -> None:
    # 4 layers, pages of 16 tokens and 8192 bytes: 2 heads × 64 × float32.
    pointers = [0x7000_0000 - 0x1000_000 * i for i in range(8)]
    layout = sglang(
        pointers, [819200] * 8, [8192] * 8, page_size=16, num_heads=2, head_dim=64, dtype="float32"
    )
    assert (layout.num_layers, layout.num_kv, layout.num_blocks) == (4, 2, 100)
    assert layout.layer_offsets()[0].tolist() == [0x7000_000, 0x3000_000]
    latent = sglang(
        pointers[:3],
        [1152 * 160] * 3,
        [1152 * 16] * 3,
        page_size=16,
        num_heads=1,
        head_dim=576,
        dtype="bfloat16",
        latent=True,
    )
    assert (latent.num_layers, latent.num_kv, latent.num_blocks, latent.itemsize) == (3, 1, 10, 2)


def test_sglang_states_are_rows() -> None:
    layout = opaque_rows([4096, 0], [4000, 4000], [1000, 1000], first_head=2, total_heads=4)
    assert (layout.num_blocks, layout.head_dim, layout.block_tokens) == (4, 1000, 1)
    assert (layout.heads, layout.total_heads) == (range(2, 3), 4)
    assert layout.layer_offsets().ravel().tolist() == [4096, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_ptrs": [0, 4096, 8192]}, "3 pointers, 4 lengths"),
        ({"item_lens": [128, 128, 128, 256]}, "buffer 3 has 4096 bytes in items of 256"),
        ({"item_lens": [64] * 4}, "a page has 64 bytes, but 4 tokens × 1 heads × 16 dim"),
        ({"dtype": "float24"}, "size of an element of dtype 'float24' is not known"),
        ({"data_lens": [100] * 4}, "does not hold an item"),
        ({"data_ptrs": [0, 4096, 8192, 8192 + 64]}, "overlap"),
    ],
)
def test_sglang_descriptions_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "data_ptrs": [0, 4096, 8192, 12288],
        "data_lens": [4096] * 4,
        "item_lens": [128] * 4,
        "page_size": 4,
        "num_heads": 1,
        "head_dim": 16,
        "dtype": "float16",
        **changes,
    }
    with pytest.raises(UsageError, match=words):
        sglang(**arguments)
    with pytest.raises(UsageError, match="whether the cache is latent"):
        sglang([0, 1, 2], [9] * 3, [3] * 3, page_size=1, num_heads=1, head_dim=3, dtype="int8")


@pytest.mark.parametrize("num_kv", [1, 2])
def test_trtllm_pool(num_kv: int) -> None:
    pool = np.zeros((B, L, num_kv, H * N * D), np.float16)
    layout = trtllm(pool, num_heads=H, block_tokens=N, head_dim=D, first_layer=3, total_layers=9)
    assert trtllm(pool, num_heads=H, block_tokens=N, head_dim=D, dtype="half").dtype == "float16"
    logical = pool.reshape(B, L, num_kv, H, N, D).transpose(1, 2, 0, 4, 3, 5)
    check(pool, layout, logical)
    assert layout.layers == range(3, 6)
    with pytest.raises(UsageError, match=r"is not \[blocks, layers, 1 or 2, 2 heads × 4 tokens × 9"):
        trtllm(pool, num_heads=H, block_tokens=N, head_dim=9)


def test_older_vllm_tensors_by_their_axes() -> None:
    outside, inside = np.zeros((L, 2, B, N, H, D), np.float16), np.zeros((L, B, 2, N, H, D), np.float16)
    check(outside, KVLayout.from_tensors(list(outside), "2bthd"), outside)
    check(inside, KVLayout.from_tensors(list(inside), "b2thd"), inside.transpose(0, 2, 1, 3, 4, 5))


def test_slices_of_ranks() -> None:
    assert [heads_of(8, 4, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [heads_of(2, 8, rank) for rank in range(8)] == [(0, 1)] * 4 + [(1, 1)] * 4
    assert [heads_of(1, 4, rank) for rank in range(4)] == [(0, 1)] * 4
    assert [layers_of(80, 4, rank) for rank in range(4)] == [(0, 20), (20, 20), (40, 20), (60, 20)]
    assert [layers_of(61, 3, rank, [20, 21, 20]) for rank in range(3)] == [(0, 20), (20, 21), (41, 20)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: heads_of(8, 3, 0), "8 heads cannot be divided evenly among tp_size 3"),
        (lambda: heads_of(8, 4, 4), "tp_rank 4 of tp_size 4"),
        (lambda: layers_of(61, 4, 0), "61 layers cannot .* partition="),
        (lambda: layers_of(8, 2, 2), "pp_rank 2 of pp_size 2"),
        (lambda: layers_of(8, 2, 0, [4, 5]), r"\[4, 5\] is not 8 layers in 2 stages"),
    ],
)
def test_slices_that_no_rank_holds(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        make()
    assert caught.value.code == "invalid-argument"
