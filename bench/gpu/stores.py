"""Pages that a kernel stores by itself into memory that was offered for that, measured on one GPU."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from cuda.core import Device, LaunchConfig, launch

from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.gpu.commands import compiled
from kvxfer.bench.gpu.copies import Copy, whole
from kvxfer.gpu import StoreOffer, offer_stores, shareable_memory, sources, store_ring_nbytes

_GROUP = "pages that a kernel stores into memory that was offered, on this GPU, which is no NVLink"
_NUM_THREADS = 512


@contextlib.contextmanager
def stores(
    device: int, nbytes: int, page_nbytes: tuple[int, ...], num_ctas: tuple[int, ...], limit: str
) -> Iterator[list[Copy]]:
    """Yields a whole copy, and the examples' kernels for pages of each size with each number of CTAs.

    They store by registers and, from sm_90 on, in bulk.

    Raises
    ------
    UsageError
        ``unsupported``: no memory can be shared here.
    """
    here = Device(device)
    here.set_current()
    capability = torch.cuda.get_device_capability(device)
    # How, the example with its kernel, and what that wants of shared memory.
    examples = [("", "store_pages.cu", "store_pages", 0)]
    if capability >= (9, 0):
        examples.append((" in bulk", "store_in_bulk.cu", "store_pages_in_bulk", store_ring_nbytes()))
    kernels = [
        (how, compiled((sources.ROOT / "gpu" / "examples" / file).read_text(), entry, capability), shared)
        for how, file, entry, shared in examples
    ]
    with shareable_memory(device):
        theirs = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        word = torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
    ours = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=f"cuda:{device}")
    stream = torch.cuda.Stream(device)
    ends = socket.socketpair(socket.AF_UNIX)
    with contextlib.ExitStack() as stack:
        for end in ends:
            stack.callback(end.close)
        mapped = []
        for tensor in (theirs, word):
            stack.enter_context(offer_stores(tensor)).send(ends[0])
            offer = stack.enter_context(StoreOffer.receive(ends[1]))
            mapped.append(stack.enter_context(offer.map(device)))

        def stored(how: str, kernel: Any, shared_nbytes: int, of: int, ctas: int) -> Copy:
            table = torch.randperm(nbytes // of, device=f"cuda:{device}").to(torch.int32)

            def submit() -> None:
                launch(
                    here.create_stream(stream),
                    LaunchConfig(grid=ctas, block=_NUM_THREADS, shmem_size=shared_nbytes),
                    kernel,
                    mapped[0].address,
                    ours.data_ptr(),
                    table.data_ptr(),
                    np.uint32(len(table)),
                    np.uint64(of),
                    mapped[1].address,
                )

            def check() -> None:
                if not torch.equal(theirs.view(-1, of), ours.view(-1, of)[table.long()]):
                    raise CheckFailedError(f"a kernel that stores pages of {of} bytes{how} stored others")

            name = f"{of // 1024} KiB{how}, {ctas} CTAs"
            return Copy(_GROUP, name, 0, 2 * nbytes, stream, submit, theirs, check)

        copies = [stored(*kernel, of, ctas) for kernel in kernels for of in page_nbytes for ctas in num_ctas]
        torch.cuda.synchronize(device)
        yield [whole(limit, ours, torch.zeros_like(ours)), *copies]
