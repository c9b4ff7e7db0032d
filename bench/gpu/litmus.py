"""Message passing between a GPU's kernels and this host, round by round: what was not seen as it was stored.

Of the chain that transfers rest on (native/gpu/litmus.cu), once with its fences, and once without, for
comparison: a GPU may be right without them, or not.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, launch

from kvxfer.bench import _limits
from kvxfer.bench.errors import BenchError
from kvxfer.gpu import architecture, compiler
from kvxfer.gpu.kernels import Kernel

_NUM_CTAS, _NUM_THREADS = 64, 256
_NUM_WORDS = 1 << 15
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Litmus:
    """What came of so many rounds: words that were not what they should have been.

    ``at_host`` and ``at_stream`` are of a kernel's stores to the host's memory and the device's, ``of_host``
    of the host's for a kernel behind a stream's wait. With fences there may be none.
    """

    name: str
    is_fenced: bool
    num_rounds: int
    at_host: int
    at_stream: int
    of_host: int

    @property
    def num_wrong(self) -> int:
        return self.at_host + self.at_stream + self.of_host


def run(device: int, num_rounds: int) -> list[Litmus]:
    """Returns what is found with the fences, and without; raises where a round takes longer than a minute."""
    torch.cuda.set_device(device)
    target = architecture.for_capability(*torch.cuda.get_device_capability(device))
    code = ObjectCode.from_cubin(
        compiler.compile_kernel(Kernel("litmus", 80), target).cubin.code, name="litmus"
    )
    return [_rounds(device, code, is_fenced, num_rounds) for is_fenced in (True, False)]


def _rounds(index: int, code: Any, is_fenced: bool, num_rounds: int) -> Litmus:
    device = Device(index)
    device.set_current()
    say = code.get_kernel(f"kvxfer_litmus_say{'' if is_fenced else '_unfenced'}")
    see = code.get_kernel("kvxfer_litmus_see")
    config = LaunchConfig(grid=_NUM_CTAS, block=_NUM_THREADS)

    def device_words(count: int) -> Any:
        return torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")

    def host_words(count: int) -> Any:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    pages, arrivals, wrong = device_words(_NUM_WORDS), device_words(1), device_words(2)
    said, reply = host_words(_NUM_WORDS), host_words(_NUM_WORDS)
    # Each on a line of its own: what the device tells, what lets its stream go, what lets the next round.
    words = host_words(48)
    done, word, ack = (words[at:].data_ptr() for at in (0, 16, 32))
    torch.cuda.synchronize(index)
    ours = [torch.cuda.Stream(index) for _ in range(2)]
    first, second = (device.create_stream(each) for each in ours)
    number = np.uint32(_NUM_WORDS)
    with ThreadPoolExecutor(1) as host:
        relayed = host.submit(
            _limits.relay,
            done,
            word,
            said.data_ptr(),
            reply.data_ptr(),
            _NUM_WORDS,
            num_rounds,
            _TIMEOUT_S,
        )
        for turn in range(1, num_rounds + 1):
            of = np.uint32(turn)
            _wait(ours[0], ack, turn - 1)
            arguments = pages.data_ptr(), said.data_ptr(), number, of, arrivals.data_ptr(), done
            launch(first, config, say, *arguments)
            _wait(ours[1], word, turn)
            launch(second, config, see, pages.data_ptr(), reply.data_ptr(), number, of, wrong.data_ptr())
            _write(ours[1], ack, turn)
        try:
            at_host = relayed.result()
        except TimeoutError as error:
            raise BenchError(str(error)) from None
    torch.cuda.synchronize(index)
    at_stream, of_host = (int(count) for count in wrong.tolist())
    return Litmus(
        "with fences" if is_fenced else "without fences",
        is_fenced,
        num_rounds,
        at_host,
        at_stream,
        of_host,
    )


def _wait(stream: Any, address: int, value: int) -> None:
    flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    _check(driver.cuStreamWaitValue32(stream.cuda_stream, address, value, int(flags)))


def _write(stream: Any, address: int, value: int) -> None:
    _check(driver.cuStreamWriteValue32(stream.cuda_stream, address, value, 0))


def _check(answer: tuple[Any, ...]) -> None:
    if int(answer[0]) != 0:
        raise BenchError(f"the driver refused a stream's wait or store: {answer[0]}")
