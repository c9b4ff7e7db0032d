"""Pages that a kernel stores by itself into memory that was offered for that, measured on one GPU."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import numpy as np
import torch

from kvxfer.bench.errors import CheckFailedError
from kvxfer.bench.gpu_copies import Copy, whole
from kvxfer.gpu import StoreOffer, include_path, offer_stores, shareable_memory, sources

_GROUP = "pages that a kernel stores into memory that was offered, on this GPU, which is no NVLink"
_NUM_THREADS = 512


@contextlib.contextmanager
def stores(
    device: int, nbytes: int, page_nbytes: tuple[int, ...], num_ctas: tuple[int, ...], limit: str
) -> Iterator[list[Copy]]:
    """Yields a whole copy, and the example's kernel for pages of each size with each number of CTAs.

    Raises
    ------
    UsageError
        ``unsupported``: no memory can be shared here.
    """
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    here = Device(device)
    here.set_current()
    major, minor = torch.cuda.get_device_capability(device)
    program = Program(
        (sources.ROOT / "gpu" / "examples" / "store_pages.cu").read_text(),
        "c++",
        ProgramOptions(arch=f"sm_{major}{minor}", include_path=[include_path()]),
    )
    kernel = program.compile("cubin").get_kernel("store_pages")
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

        def stored(of: int, ctas: int) -> Copy:
            table = torch.randperm(nbytes // of, device=f"cuda:{device}").to(torch.int32)

            def submit() -> None:
                launch(
                    here.create_stream(stream),
                    LaunchConfig(grid=ctas, block=_NUM_THREADS),
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
                    raise CheckFailedError(f"a kernel that stores pages of {of} bytes stored others")

            name = f"{of // 1024} KiB, {ctas} CTAs"
            return Copy(_GROUP, name, limit, 0, 2 * nbytes, stream, submit, theirs, check)

        copies = [stored(of, ctas) for of in page_nbytes for ctas in num_ctas]
        torch.cuda.synchronize(device)
        yield [whole(limit, ours, torch.zeros_like(ours)), *copies]
