"""schema: different versions of kvxfer understand each other, or the error says why not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer import region_descriptor
from kvxfer.errors import UsageError
from kvxfer.layout import kv_layout
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.quantization import Quantization
from kvxfer.layout.schema import Field, Schema, integer, text
from kvxfer.region_descriptor import RegionDescriptor

PLAIN = KVLayout.from_tensor(np.zeros((4, 2, 3), np.int8), "lbd")
RICH = replace(
    PLAIN,
    quantization=Quantization.per_tensor(0.5, saturate=True),
    null_block=0,
    cp_rank=1,
    cp_size=2,
    model="org/model",
    group="full",
)
DESCRIPTOR = RegionDescriptor("decode", bytes(range(16)), 7, "kv", PLAIN.nbytes, 2, PLAIN)

# What the layout of a kvxfer before quantization and context parallelism would read.
OLDER = kv_layout._SCHEMA._replace(
    version=1,
    fields=tuple(
        item
        for item in kv_layout._SCHEMA.fields
        if item.name not in ("quantization", "null_block", "cp_rank", "cp_size", "cp_interleave", "model")
    ),
)


def document(item: KVLayout | RegionDescriptor, /, **changes: Any) -> bytes:
    return json.dumps({**json.loads(item.to_bytes()), **changes}).encode()


def test_defaults_are_left_out_and_needs_are_named() -> None:
    plain, rich = json.loads(PLAIN.to_bytes()), json.loads(RICH.to_bytes())
    assert plain["kvxfer_layout"] == rich["kvxfer_layout"] == 2
    assert not {"needs", "offsets", "quantization", "null_block", "model"} & set(plain)
    assert plain["itemsize"] == 1
    assert rich["needs"] == ["quantization", "null_block", "cp_rank", "cp_size"]
    assert rich["quantization"] == {"per": "tensor", "scales": "AAAAPw==", "saturate": True}
    assert "cp_interleave" not in rich


@pytest.mark.parametrize("layout", [PLAIN, RICH])
def test_a_document_from_the_future_loads(layout: KVLayout) -> None:
    encoded = document(layout, kvxfer_layout=7, colour=["blue", {"a": None}], offset_hint=1.5)
    assert KVLayout.from_bytes(encoded) == layout


def test_a_field_of_the_future_within_the_quantization_is_passed_over() -> None:
    scales = json.loads(RICH.to_bytes())["quantization"]
    assert KVLayout.from_bytes(document(RICH, quantization={**scales, "colour": 1})) == RICH
    with pytest.raises(UsageError, match=r"version 3 needs quantization\.zero_points"):
        KVLayout.from_bytes(
            document(
                RICH,
                kvxfer_layout=3,
                quantization={**scales, "zero_points": "AAAA"},
                needs=["quantization", "quantization.zero_points"],
            )
        )


def test_a_needed_field_of_the_future_is_refused_in_words() -> None:
    encoded = document(PLAIN, kvxfer_layout=3, needs=["swizzle"], swizzle=4)
    with pytest.raises(UsageError) as caught:
        KVLayout.from_bytes(encoded)
    words = str(caught.value)
    assert "layout of version 3 needs swizzle" in words
    assert "this kvxfer (version 2)" in words
    assert "upgrade kvxfer at this end" in words
    assert caught.value.code == "invalid-argument"


def test_a_document_of_the_past_loads() -> None:
    # It named every field that it had, and no needs.
    values = {name: getattr(PLAIN, name) for name in (item.name for item in OLDER.fields)}
    encoded = json.dumps({"kvxfer_layout": 1, **values}).encode()
    assert KVLayout.from_bytes(encoded) == PLAIN


def test_an_older_reader_reads_what_it_can() -> None:
    values = OLDER.decode(replace(PLAIN, model="org/model").to_bytes(), 1 << 16)
    assert values == {item.name: getattr(PLAIN, item.name) for item in OLDER.fields}
    for field, layout in (
        ("quantization", replace(PLAIN, quantization=Quantization.per_tensor(0.5))),
        ("null_block", replace(PLAIN, null_block=0)),
        ("cp_size", replace(PLAIN, cp_size=2)),
    ):
        with pytest.raises(UsageError, match=rf"version 2 needs {field}, .*this kvxfer \(version 1\)"):
            OLDER.decode(layout.to_bytes(), 1 << 16)


def test_region_descriptors_of_other_versions() -> None:
    assert json.loads(DESCRIPTOR.to_bytes())["kvxfer_region"] == 3
    assert RegionDescriptor.from_bytes(DESCRIPTOR.to_bytes()) == DESCRIPTOR
    assert RegionDescriptor.from_bytes(document(DESCRIPTOR, kvxfer_region=1)) == DESCRIPTOR
    assert RegionDescriptor.from_bytes(document(DESCRIPTOR, kvxfer_region=9, device="gpu:0")) == DESCRIPTOR
    with pytest.raises(UsageError, match=r"region descriptor of version 9 needs device, .*\(version 3\)"):
        RegionDescriptor.from_bytes(document(DESCRIPTOR, kvxfer_region=9, device="gpu:0", needs=["device"]))
    # An older reader does without the address.
    older = region_descriptor._SCHEMA._replace(
        version=2, fields=tuple(item for item in region_descriptor._SCHEMA.fields if item.name != "address")
    )
    somewhere = replace(DESCRIPTOR, address="tcp://10.0.0.7:7301")
    assert RegionDescriptor.from_bytes(somewhere.to_bytes()).address == somewhere.address
    assert older.decode(somewhere.to_bytes(), 1 << 16) == older.decode(DESCRIPTOR.to_bytes(), 1 << 16)
    # The inner layout has its own needs.
    layout = document(PLAIN, kvxfer_layout=3, needs=["swizzle"], swizzle=4).decode()
    with pytest.raises(UsageError, match="layout of version 3 needs swizzle"):
        RegionDescriptor.from_bytes(document(DESCRIPTOR, layout=layout))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kvxfer_region": 0}, "has no version"),
        ({"incarnation": "xx"}, "incarnation is not a string of hexadecimal digits"),
        ({"incarnation": "00"}, "incarnation must have 16 bytes"),
        ({"address": 7}, "address is a int"),
        ({"address": "tcp://0.0.0.0:7"}, "all addresses of a host"),
        ({"address": "http://10.0.0.7"}, "an agent's address is"),
        ({"agent": ""}, "name must be text of 1 to 128 bytes"),
        ({"layout": {}}, "layout is a dict"),
        ({"layout": "\ud800"}, "layout is not a text"),
        ({"id": 1 << 64}, "64 bits"),
        ({"num_blocks": 3}, "contradicts"),
    ],
)
def test_damaged_region_descriptors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        RegionDescriptor.from_bytes(document(DESCRIPTOR, **changes))
    assert caught.value.code == "invalid-argument"


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ("null_block", "needs is not a list"),
        (["x" * 65], "needs is not a list"),
        (["x"] * 65, "needs is not a list"),
        (["model"], "needs model, but has no such field"),
        (["quantization.scales"], r"needs quantization\.scales, but has no such field"),
    ],
)
def test_absurd_needs(needs: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        KVLayout.from_bytes(document(PLAIN, needs=needs))


def test_bounds_of_a_document() -> None:
    schema = Schema("thing", "v", 4, (Field("n", integer), Field("names", text, "x")))
    assert schema.decode(b'{"v":4,"n":1}', 13) == {"n": 1, "names": "x"}
    for encoded, words in (
        (b'{"v":4,"n":12}', "of 14 bytes is over the bound of 13"),
        (b'{"v":4,"n":1}}', "over the bound"),
        (b'{"v":4,"n":1', "not JSON"),
        (b'{"n":1,"n":1}', "twice"),
        (b'{"v":4}', "thing lacks n"),
        (b'{"v":4,"n":[]}'[:13], "not JSON"),
    ):
        with pytest.raises(UsageError, match=words):
            schema.decode(encoded, 13)
