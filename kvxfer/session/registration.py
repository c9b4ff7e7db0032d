"""Checks memory before it is registered: its tensors, the ranges that they cover, and a layout that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvxfer.arguments import check_kind
from kvxfer.errors import UsageError, invalid
from kvxfer.layout.kv_layout import KVLayout
from kvxfer.layout.tensor import TensorView, covering_spans, views_of
from kvxfer.options import AgentOptions


@dataclass(frozen=True, slots=True)
class Registration:
    """Memory that can be registered.

    Attributes
    ----------
    views
        Views of every tensor; they keep the memory alive.
    layout
        The layout; offsets count from the first span's first byte.
    spans
        ``(address, nbytes)``, ascending.
    nbytes
        From the first span's first byte to the last one's end.
    device
        Index of the GPU that holds all of it; -1 for host memory.
    """

    views: list[TensorView]
    layout: KVLayout
    spans: list[tuple[int, int]]
    nbytes: int
    device: int


def registration_of(name: str, memory: Any, layout: KVLayout | None, options: AgentOptions) -> Registration:
    """Checks the memory of a new region `name`; `Agent.register` explains the arguments.

    Raises
    ------
    UsageError
        As in `Agent.register`.
    """
    what = "a KVLayout, e.g. from KVLayout.from_tensor(tensor, axes)"
    check_kind(layout, "layout", KVLayout | None, what)
    views = views_of(memory, f"region {name!r}")
    if layout is None:
        layout = _plain_layout(views)
    device = -1
    if any(seen.gpu is not None for seen in views):
        from kvxfer.gpu import registrable

        device = registrable.device_of(name, views, options)
    spans = covering_spans(views)
    if not spans:
        raise invalid(f"region {name!r} would have no bytes")
    nbytes = spans[-1][0] + spans[-1][1] - spans[0][0]
    if layout.nbytes > nbytes:
        raise UsageError(
            f"the layout of region {name!r} spans {layout.nbytes} bytes, but the memory has {nbytes}: read "
            "the layout off the tensors that you register",
            code="length-mismatch",
        )
    return Registration(views, layout, spans, nbytes, device)


def _plain_layout(views: list[TensorView]) -> KVLayout:
    if len(views) != 1 or len(views[0].shape) != 2:
        raise invalid(
            "the layout can be left out only for one tensor [blocks, elements]: pass "
            'KVLayout.from_tensor(tensor, axes="l2bthd") or from_tensors'
        )
    return KVLayout.from_tensor(views[0], "bd")
