"""``kvxfer/device.cuh`` in a user's kernel: it fires, posts and stores on a GPU."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import kvxfer
from kvxfer.gpu import include_path, shareable_memory, sources, store_ring_nbytes

pytestmark = pytest.mark.gpu

EXAMPLES = sources.ROOT / "gpu" / "examples"
FIRES = """
#include "kvxfer/device.cuh"
extern "C" __global__ void fires(unsigned* word) { kvxfer::fire(word, 7); }
"""
TIMEOUT_S = 60.0


def compiled(code: str, architecture: str) -> bytes:
    """Compiles as a kernel's author does: with the folder of kvxfer's header and nothing else of kvxfer."""
    from cuda.core import Program, ProgramOptions

    program = Program(code, "c++", ProgramOptions(arch=architecture, include_path=[include_path()]))
    try:
        return bytes(program.compile("cubin").code)
    finally:
        program.close()


@pytest.fixture
def module_of() -> Any:
    """Loads a kernel and returns a function that launches it in torch's current stream."""
    import torch
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    device = Device(torch.cuda.current_device())
    device.set_current()
    major, minor = torch.cuda.get_device_capability()
    architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def load(code: str, entry: str) -> Any:
        kernel = ObjectCode.from_cubin(compiled(code, architecture), name=entry).get_kernel(entry)

        def run(num_ctas: int, num_threads: int, *arguments: Any, shared_nbytes: int = 0) -> None:
            stream = device.create_stream(torch.cuda.current_stream())
            config = LaunchConfig(grid=num_ctas, block=num_threads, shmem_size=shared_nbytes)
            launch(stream, config, kernel, *arguments)

        return run

    return load


def test_a_kernel_of_many_ctas_lets_a_transfer_go(module_of: Any) -> None:
    import numpy as np
    import torch

    options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=("loopback", "cuda_ipc"))
    num_ctas, num_words = 64, 1 << 20
    with kvxfer.Agent("src", options) as src, kvxfer.Agent("dst", options) as dst:
        # Host and kernel reach pinned memory at the same address.
        page = torch.zeros((2, num_words), dtype=torch.int32, pin_memory=True)
        landed = np.zeros((2, num_words), np.int32)
        region, target = src.register("kv", page), dst.register("kv", landed)
        there = src.connect_blocking(dst.address, TIMEOUT_S)
        target.grant(dst.accept_blocking("src", TIMEOUT_S), None, "write", ttl_s=TIMEOUT_S)
        remote = there.region_blocking("kv", TIMEOUT_S)
        write = module_of((EXAMPLES / "write_layer.cu").read_text(), "write_layer")
        trigger = src.trigger()
        for run in range(50):
            trigger.reset()
            transfer = src.write(region, remote, [1], [0], after=trigger.at(num_ctas), timeout_s=TIMEOUT_S)
            write(
                num_ctas,
                256,
                page[1].data_ptr(),
                np.uint32(num_words),
                np.uint32(run),
                trigger.share(),
            )
            transfer.wait(TIMEOUT_S)
            np.testing.assert_array_equal(landed[0], np.arange(run, run + num_words, dtype=np.int32))


def test_one_thread_fires(module_of: Any) -> None:
    import torch

    options = kvxfer.AgentOptions(listen="", transports=("loopback", "cuda_ipc"))
    with kvxfer.Agent("alone", options) as agent:
        trigger = agent.trigger()
        module_of(FIRES, "fires")(1, 1, trigger.share())
        torch.cuda.synchronize()
        assert trigger.value == 7


def test_ctas_start_the_transfer_of_each_page(module_of: Any, seed: int) -> None:
    import numpy as np
    import torch

    options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=("cuda_ipc",))
    num_layers, num_blocks, num_words = 4, 64, 4096
    layout_of = kvxfer.KVLayout.from_tensor
    with kvxfer.Agent("src", options) as src, kvxfer.Agent("dst", options) as dst:
        shape = (num_layers, num_blocks, 1, num_words)
        # Only another process may open memory from cudaMalloc.
        with shareable_memory():
            pages, landed = (torch.zeros(shape, dtype=torch.int32, device="cuda") for _ in range(2))
        torch.cuda.synchronize()
        region = src.register("kv", pages, layout_of(pages, "lbtd"))
        target = dst.register("kv", landed, layout_of(landed, "lbtd"))
        there = src.connect_blocking(dst.address, TIMEOUT_S)
        target.grant(dst.accept_blocking("src", TIMEOUT_S), None, "write", ttl_s=TIMEOUT_S)
        remote = there.region_blocking("kv", TIMEOUT_S)
        post = module_of((EXAMPLES / "post_pages.cu").read_text(), "post_pages")
        blocks = np.random.default_rng(seed).permutation(num_blocks)
        table = torch.tensor(blocks, dtype=torch.int32, device="cuda")
        lost = torch.zeros(1, dtype=torch.int32, device="cuda")
        with src.command_ring(128) as ring:
            prepared = ring.prepare_write(region, remote, blocks, blocks[::-1].copy())
            for run in range(10):
                for layer in range(num_layers):
                    post(
                        16,
                        256,
                        pages[layer].data_ptr(),
                        np.uint32(num_words),
                        table.data_ptr(),
                        np.uint32(num_blocks),
                        np.uint32(1000 * run + layer),
                        ring.address,
                        np.uint32(prepared.number),
                        np.uint32(layer),
                        lost.data_ptr(),
                    )
                torch.cuda.synchronize()
                posted = (run + 1) * num_layers * num_blocks - int(lost.item())
                ring.ended_blocking(posted, TIMEOUT_S)
                assert ring.take_failures() == []
                assert not lost.item()
                torch.cuda.synchronize()
                for src_block, dst_block in zip(blocks, blocks[::-1], strict=True):
                    assert torch.equal(pages[:, src_block], landed[:, dst_block])


@contextlib.contextmanager
def stored_to(*shapes: tuple[int, ...]) -> Iterator[tuple[list[Any], list[int]]]:
    """Yields tensors of bytes in memory that is offered for stores, and the addresses to store at."""
    import torch

    from kvxfer.gpu import StoreOffer, offer_stores

    with shareable_memory():
        tensors = [torch.zeros(shape, dtype=torch.uint8, device="cuda") for shape in shapes]
    torch.cuda.synchronize()
    with contextlib.ExitStack() as stack:
        ends = socket.socketpair(socket.AF_UNIX)
        for end in ends:
            stack.callback(end.close)
        addresses = []
        for tensor in tensors:
            with offer_stores(tensor) as offer:
                offer.send(ends[0])
            received = stack.enter_context(StoreOffer.receive(ends[1]))
            addresses.append(stack.enter_context(received.map()).address)
            assert addresses[-1] != tensor.data_ptr()
        yield tensors, addresses
        torch.cuda.synchronize()  # before the mappings end


@pytest.mark.parametrize("in_bulk", [False, True])
# Pages on 16-byte boundaries and off them: whole stages of a ring, one that ends inside a vector, one of odd
# length.
@pytest.mark.parametrize("page_nbytes", [64 * 1024, 20_008, 4_099])
def test_pages_are_stored_into_memory_that_was_offered(
    module_of: Any, page_nbytes: int, in_bulk: bool
) -> None:
    import numpy as np
    import torch

    num_pages, num_ctas, num_rounds, num_looks = 64, 16, 20, 10_000_000
    example, entry = (
        ("store_in_bulk.cu", "store_pages_in_bulk") if in_bulk else ("store_pages.cu", "store_pages")
    )
    store = module_of((EXAMPLES / example).read_text(), entry)
    read = module_of((EXAMPLES / "store_pages.cu").read_text(), "read_pages")
    reading = torch.cuda.Stream()
    table = torch.randperm(num_pages, device="cuda").to(torch.int32)
    ours = torch.empty((num_pages, page_nbytes), dtype=torch.uint8, device="cuda")
    total = torch.empty(1, dtype=torch.int32, device="cuda")
    with stored_to((num_pages, page_nbytes), (4,)) as ((theirs, word), (to, told)):

        def look(num_stored: int) -> None:
            with torch.cuda.stream(reading):
                num_words = np.uint32(theirs.numel() // 4)
                awaited = (np.uint32(num_stored), np.uint32(num_looks))
                read(4, 256, theirs.data_ptr(), num_words, word.data_ptr(), *awaited, total.data_ptr())

        def store_first(count: int) -> None:
            shared_nbytes = store_ring_nbytes() if in_bulk else 0
            pages = (to, ours.data_ptr(), table.data_ptr(), np.uint32(count), np.uint64(page_nbytes))
            store(num_ctas, 256, *pages, told, shared_nbytes=shared_nbytes)

        # A kernel's first launch may wait for other kernels; the launches below must not.
        store_first(0)
        look(0)
        for run in range(num_rounds):
            torch.cuda.synchronize()
            ours.random_(0, 256)
            total.zero_()
            torch.cuda.synchronize()
            look((run + 2) * num_ctas)  # while the other kernel stores
            store_first(num_pages)
            torch.cuda.synchronize()
            assert word.view(torch.int32).item() == (run + 2) * num_ctas
            stored = ours[table.long()]
            assert torch.equal(theirs, stored)
            assert (stored.flatten().view(torch.int32).sum().item() - total.item()) % 2**32 == 0


def test_pages_that_a_kernel_computes_are_stored_while_it_computes_the_next(module_of: Any) -> None:
    import numpy as np
    import torch

    num_pages, page_tokens, head_dim, num_ctas = 96, 16, 128, 8
    rotate = module_of((EXAMPLES / "store_in_bulk.cu").read_text(), "rotate_and_store")
    page_nbytes = page_tokens * head_dim * 4
    with stored_to((num_pages, page_nbytes), (4,)) as ((theirs, word), (to, told)):
        for run in range(20):
            keys = torch.randn(num_pages * page_tokens, head_dim, device="cuda")
            angles = torch.rand(num_pages * page_tokens, head_dim // 2, device="cuda")
            cosines, sines = angles.cos(), angles.sin()
            table = torch.randperm(num_pages, device="cuda").to(torch.int32)
            rotate(
                num_ctas,
                256,
                to,
                keys.data_ptr(),
                cosines.data_ptr(),
                sines.data_ptr(),
                table.data_ptr(),
                np.uint32(num_pages),
                np.uint32(page_tokens),
                np.uint32(head_dim),
                told,
                shared_nbytes=2 * page_nbytes,
            )
            torch.cuda.synchronize()
            assert word.view(torch.int32).item() == (run + 1) * num_ctas
            first, second = keys.chunk(2, dim=1)
            rotated = torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=1)
            stored = theirs.view(torch.float32).view(num_pages, page_tokens, head_dim)[table.long()]
            # The kernel may fuse a product and a sum into one instruction.
            torch.testing.assert_close(stored.flatten(0, 1), rotated, rtol=1e-5, atol=1e-5)
