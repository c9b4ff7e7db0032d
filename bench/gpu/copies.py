"""Copies on a GPU that are measured: what each moves, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvxfer
from kvxfer import plan
from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.run import memory
from kvxfer.bench.work.layout_pair import LayoutWork
from kvxfer.bench.work.page_data import block_order
from kvxfer.gpu.copy_stream import CopyStream, Direction
from kvxfer.plan.units import pair_units

_MODEL = "Llama-3.1-8B"


@dataclass(frozen=True, slots=True)
class Copy:
    """Something that a stream can be told to do again and again.

    ``asked`` is the share of its limit that it is to reach. ``nbytes`` are read and written on the device;
    moved once where one side is the host. ``dst`` is cleared before ``check``, which raises
    `CheckFailedError`: what another copy left there is not taken for this one's.
    """

    group: str
    name: str
    asked: float
    nbytes: int
    stream: Any
    submit: Callable[[], None]
    dst: Any
    check: Callable[[], None]


def torch_stream(stream: CopyStream) -> Any:
    """Returns a copy stream as torch knows streams."""
    return torch.cuda.ExternalStream(stream.handle)


def whole(name: str, src: Any, dst: Any, *, moved_once: bool = False) -> Copy:
    """One large copy by torch, which is the limit of the others."""
    stream = torch.cuda.Stream()

    def submit() -> None:
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)

    def check() -> None:
        _require(_same(src, dst), name)

    nbytes = src.numel() * src.element_size()
    return Copy("limit", name, 0, nbytes * (1 if moved_once else 2), stream, submit, dst, check)


class Pages:
    """Pages of one size, in two memories of equal length."""

    def __init__(self, src: Any, dst: Any, page_nbytes: int) -> None:
        self.page_nbytes = page_nbytes
        self.num_pages = src.numel() // page_nbytes
        shape = 1, self.num_pages, page_nbytes
        layout = kvxfer.KVLayout.from_tensor(memory.reserve(src.numel()).reshape(shape), axes="lbd")
        self._program = plan.compile_program(layout, layout)
        self._src, self._dst = src, dst
        self._random = [block_order(self.num_pages, seed) for seed in (1, 2)]
        self._straight = np.arange(self.num_pages, dtype=np.uint32)

    def copy(
        self,
        group: str,
        how: str,
        stream: CopyStream,
        *,
        asked: float = 0,
        named: str = "",
        direction: Direction = "on_device",
    ) -> Copy:
        """How: ``gather`` (random to a row), ``scatter`` (a row to random) or ``both`` (random to random)."""
        src_ids = self._straight if how == "scatter" else self._random[0]
        dst_ids = self._straight if how == "gather" else self._random[1]
        once = not (self._src.is_cuda and self._dst.is_cuda)

        def submit() -> None:
            _submit(
                stream,
                self._program,
                src_ids,
                dst_ids,
                src=self._src.data_ptr(),
                dst=self._dst.data_ptr(),
                direction=direction,
            )

        name = f"{named or how}, {self.page_nbytes // 1024} KiB"
        return Copy(
            group,
            name,
            asked,
            self._src.numel() * (1 if once else 2),
            torch_stream(stream),
            submit,
            self._dst,
            lambda: self._check(name, src_ids, dst_ids),
        )

    def _rows(self, tensor: Any) -> Any:
        # 8 bytes an element: torch's index kernels go element by element.
        return tensor.view(torch.int64).view(self.num_pages, -1)

    def _check(self, name: str, src_ids: Any, dst_ids: Any) -> None:
        src = self._rows(self._src)[torch.from_numpy(src_ids.astype(np.int64)).to(self._src.device)]
        dst = self._rows(self._dst)[torch.from_numpy(dst_ids.astype(np.int64)).to(self._dst.device)]
        _require(_same(src, dst), name)


def layouts(src_layout: str, dst_layout: str, nbytes: int, stream: CopyStream, asked: float) -> Copy:
    """Some ranks' caches into one of another layout, as `kvxfer.bench.work.layout_pair` has them."""
    work = LayoutWork.sized(src_layout, dst_layout, _MODEL, nbytes, 1)
    data, programs, parts = work.data(), work.programs(), []
    dst_host = np.zeros(work.dst.nbytes, np.uint8)
    dst_cache, dst_blocks = work.dst.place(dst_host), work.blocks(work.dst, -1)
    dst = torch.from_numpy(dst_host).cuda()
    for share, program in zip(work.shares, programs, strict=True):
        spec = work.srcs[share.src]
        host = np.zeros(spec.nbytes, np.uint8)
        cache, blocks = spec.place(host), work.blocks(spec, share.src)
        data.fill(cache, blocks)
        pairs = pair_units(cache.layout, dst_cache.layout, blocks, dst_blocks, None)
        parts.append((program, pairs, torch.from_numpy(host).cuda()))

    def submit() -> None:
        for program, pairs, src in parts:
            _submit(
                stream,
                program,
                pairs.src_ids,
                pairs.dst_ids,
                src=src.data_ptr(),
                dst=dst.data_ptr(),
                num_fine=pairs.num_fine,
            )

    def check() -> None:
        dst_host[:] = dst.cpu().numpy()
        if wrong := data.check(dst_cache, dst_blocks):
            raise CheckFailedError(f"{src_layout} -> {dst_layout}: {wrong}")

    return Copy(
        "layouts",
        f"{src_layout} -> {dst_layout}",
        asked,
        work.src_nbytes + work.dst_nbytes,
        torch_stream(stream),
        submit,
        dst,
        check,
    )


def _submit(stream: CopyStream, *what: Any, **where: Any) -> None:
    """Submits a copy, as soon as there is room for its tables."""
    while True:
        try:
            stream.copy(*what, **where)
            return
        except kvxfer.UsageError as error:
            if error.code != "again":
                raise


def _same(one: Any, other: Any) -> bool:
    # On the device where both are: to the host a GiB takes a second.
    return bool(torch.equal(one, other if one.device == other.device else other.to(one.device)))


def _require(equal: bool, name: str) -> None:
    if not equal:
        raise CheckFailedError(f"{name}: the bytes that arrived are not those that were sent")
