"""``kvxfer/device.cuh`` in a kernel of somebody else's: that it fires and posts on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

import kvxfer
from kvxfer.gpu import include_path, sources

pytestmark = pytest.mark.gpu

EXAMPLES = sources.ROOT / "gpu" / "examples"
FIRES = """
#include "kvxfer/device.cuh"
extern "C" __global__ void fires(unsigned* word) { kvxfer::fire(word, 7); }
"""
TIMEOUT_S = 60.0


def compiled(code: str, architecture: str) -> bytes:
    """Compiles as a kernel's author does: with the folder of our header and nothing else of ours."""
    from cuda.core import Program, ProgramOptions

    program = Program(code, "c++", ProgramOptions(arch=architecture, include_path=[include_path()]))
    try:
        return bytes(program.compile("cubin").code)
    finally:
        program.close()


@pytest.fixture
def module_of() -> Any:
    """Loads a kernel and returns what launches it in torch's current stream."""
    import torch
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    device = Device(torch.cuda.current_device())
    device.set_current()
    major, minor = torch.cuda.get_device_capability()
    architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def load(code: str, entry: str) -> Any:
        kernel = ObjectCode.from_cubin(compiled(code, architecture), name=entry).get_kernel(entry)

        def run(num_ctas: int, num_threads: int, *arguments: Any) -> None:
            stream = device.create_stream(torch.cuda.current_stream())
            launch(stream, LaunchConfig(grid=num_ctas, block=num_threads), kernel, *arguments)

        return run

    return load


def test_a_kernel_of_many_ctas_lets_a_transfer_go(module_of: Any) -> None:
    import numpy as np
    import torch

    options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=("loopback", "cuda_ipc"))
    num_ctas, num_words = 64, 1 << 20
    with kvxfer.Agent("src", options) as src, kvxfer.Agent("dst", options) as dst:
        # Pinned memory is the host's, and the kernel's at the same address.
        page = torch.zeros((2, num_words), dtype=torch.int32, pin_memory=True)
        landed = np.zeros((2, num_words), np.int32)
        region, target = src.register("kv", page), dst.register("kv", landed)
        there = src.connect_blocking(dst.address, TIMEOUT_S)
        target.grant(dst.accept_blocking("src", TIMEOUT_S), None, "write", ttl_s=TIMEOUT_S)
        remote = there.wait_region("kv", TIMEOUT_S)
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
                trigger.address,
            )
            transfer.wait(TIMEOUT_S)
            np.testing.assert_array_equal(landed[0], np.arange(run, run + num_words, dtype=np.int32))


def test_one_thread_fires(module_of: Any) -> None:
    import torch

    options = kvxfer.AgentOptions(listen="", transports=("loopback", "cuda_ipc"))
    with kvxfer.Agent("alone", options) as agent:
        trigger = agent.trigger()
        module_of(FIRES, "fires")(1, 1, trigger.address)
        torch.cuda.synchronize()
        assert trigger.value == 7


def test_ctas_start_the_transfer_of_each_page(module_of: Any) -> None:
    import numpy as np
    import torch

    options = kvxfer.AgentOptions(listen="tcp://127.0.0.1:0", transports=("cuda_ipc",))
    num_layers, num_blocks, num_words = 4, 64, 4096
    layout_of = kvxfer.KVLayout.from_tensor
    with kvxfer.Agent("src", options) as src, kvxfer.Agent("dst", options) as dst:
        shape = (num_layers, num_blocks, 1, num_words)
        pages, landed = (torch.zeros(shape, dtype=torch.int32, device="cuda") for _ in range(2))
        torch.cuda.synchronize()
        region = src.register("kv", pages, layout_of(pages, "lbtd"))
        target = dst.register("kv", landed, layout_of(landed, "lbtd"))
        there = src.connect_blocking(dst.address, TIMEOUT_S)
        target.grant(dst.accept_blocking("src", TIMEOUT_S), None, "write", ttl_s=TIMEOUT_S)
        remote = there.wait_region("kv", TIMEOUT_S)
        post = module_of((EXAMPLES / "post_pages.cu").read_text(), "post_pages")
        blocks = np.random.default_rng(1).permutation(num_blocks)
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
                ring.wait(posted, TIMEOUT_S)
                assert ring.failures() == []
                assert not lost.item()
                torch.cuda.synchronize()
                for src_block, dst_block in zip(blocks, blocks[::-1], strict=True):
                    assert torch.equal(pages[:, src_block], landed[:, dst_block])


def test_pages_are_stored_into_memory_that_was_offered(module_of: Any) -> None:
    import socket

    import numpy as np
    import torch

    from kvxfer.gpu import StoreOffer, offer_stores, shareable_memory

    num_pages, page_nbytes, num_ctas = 64, 64 * 1024, 16
    with shareable_memory():
        theirs = torch.zeros((num_pages, page_nbytes), dtype=torch.uint8, device="cuda")
        word = torch.zeros(1, dtype=torch.int32, device="cuda")
    ours = torch.randint(0, 256, (num_pages, page_nbytes), dtype=torch.uint8, device="cuda")
    table = torch.randperm(num_pages, device="cuda").to(torch.int32)
    torch.cuda.synchronize()
    store = module_of((EXAMPLES / "store_pages.cu").read_text(), "store_pages")
    ends = socket.socketpair(socket.AF_UNIX)
    for tensor in (theirs, word):
        with offer_stores(tensor) as offer:
            offer.send(ends[0])
    with (
        StoreOffer.receive(ends[1]) as pages_offer,
        StoreOffer.receive(ends[1]) as word_offer,
        pages_offer.map() as there,
        word_offer.map() as told,
    ):
        assert there.address != theirs.data_ptr()
        store(
            num_ctas,
            256,
            there.address,
            ours.data_ptr(),
            table.data_ptr(),
            np.uint32(num_pages),
            np.uint64(page_nbytes),
            told.address,
        )
    torch.cuda.synchronize()
    assert word.item() == num_ctas
    assert torch.equal(theirs, ours[table.long()])
    for end in ends:
        end.close()
