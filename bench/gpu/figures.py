"""``python -m kvxfer.bench.gpu.figures JSON``: one group of `make gpu-check`'s figures, by itself.

Prints each result as a line of JSON as soon as it is known (its ``kind`` says of what). Every copy is checked
before it is measured; rounds go through all copies of a group in turn.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.gpu import copies as gpu_copies
from kvxfer.bench.gpu import litmus as gpu_litmus
from kvxfer.bench.gpu import processes as gpu_processes
from kvxfer.bench.gpu.check import EXIT_SAID
from kvxfer.bench.gpu.check import GROUPS as NAMES
from kvxfer.bench.gpu.copies import Copy, Pages, whole
from kvxfer.bench.gpu.rows import Row, measure, rate
from kvxfer.bench.latency.delays import by_stream
from kvxfer.bench.run.stats import MIB
from kvxfer.errors import UsageError
from kvxfer.gpu import calibration
from kvxfer.gpu.copy_stream import CopyStream, Direction

_DEVICE_COPY, _TO_HOST, _TO_DEVICE = "device to device", "device to host", "host to device"
# Of copies that follow each other without a pause: forty of a GiB in pages of 4 KiB.
_TABLES_NBYTES = 128 * MIB
_TRIGGER_ROUNDS = 500
_LITMUS_ROUNDS = 2000
_BETWEEN = "another process's pages on this GPU (no NVLink)"


@dataclass(frozen=True, slots=True)
class Options:
    """What a group is told."""

    group: str
    device: int
    total_mib: int
    rounds: int

    @property
    def nbytes(self) -> int:
        """Of a copy of pages."""
        return self.total_mib * MIB


def say(kind: str, **what: Any) -> None:
    """Prints a result."""
    print(json.dumps({"kind": kind, **what}), flush=True)


def run(options: Options) -> int:
    """Measures a group and returns an exit status; `EXIT_SAID` where bytes were wrong, and it said so."""
    torch.cuda.set_device(options.device)
    try:
        _GROUPS[options.group](options)
    except CheckFailedError as error:
        say("wrong", name=options.group, words=str(error))
        return EXIT_SAID
    except (BenchError, UsageError) as error:
        say("not run", words=f"{options.group}: {error}")
    return 0


def _rows(copies: list[Copy], options: Options) -> None:
    """Measures copies, whose first is their limit, and prints what is found."""
    for row in measure(copies, options.rounds, say):
        say("row", **asdict(row))


def _num_ctas(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextlib.contextmanager
def _streams(device: int) -> Iterator[tuple[CopyStream, CopyStream]]:
    """Yields streams that take the whole device: by every kernel, and without bulk copies."""
    num_ctas = _num_ctas(device)
    with (
        CopyStream(device, num_ctas=num_ctas, tables_nbytes=_TABLES_NBYTES) as best,
        CopyStream(device, num_ctas=num_ctas, bulk=False, tables_nbytes=_TABLES_NBYTES) as vectors,
    ):
        yield best, vectors


def _memories(nbytes: int) -> tuple[Any, Any]:
    src = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    return src, torch.zeros_like(src)


def pages(options: Options) -> None:
    """Gathers, scatters and both, of pages of each size, and torch's."""
    with _streams(options.device) as (best, vectors):
        src, dst = _memories(options.nbytes)
        for kib in (16, 64, 4):
            of_size = Pages(src, dst, kib * 1024)
            asked = 0.9 if kib >= 16 else 0
            copies = [whole(_DEVICE_COPY, src, dst)]
            copies += [of_size.copy("pages", how, best, asked=asked) for how in ("gather", "scatter", "both")]
            copies.append(of_size.copy("pages", "both", vectors, named="both, by vectors"))
            _rows(copies, options)


def layouts(options: Options) -> None:
    """Caches of one layout into one of another."""
    nbytes = options.nbytes // 4
    with _streams(options.device) as (best, _):
        # Of the kernel that converts a multiprocessor runs two CTAs at a time.
        best.set_num_ctas(2 * _num_ctas(options.device))
        pairs = (
            ("nhd", "hnd", 0.8),
            ("hnd", "nhd", 0.8),
            ("tp4+nhd", "tp2+nhd", 0.8),
            ("tp4+hnd", "tp2+hnd", 0.8),
            ("bf16", "fp8", 0.75),
            ("fp8", "bf16", 0),
        )
        copies = [gpu_copies.layouts(before, after, nbytes, best, asked) for before, after, asked in pairs]
        _rows([whole(_DEVICE_COPY, *_memories(nbytes)), *copies], options)


def host(options: Options) -> None:
    """Pages between the device and pinned memory: by kernels, by copy engines, and as calibrated."""
    found = calibration.shared(options.device)
    made = functools.partial(CopyStream, options.device, tables_nbytes=_TABLES_NBYTES)
    with (
        made(num_ctas=_num_ctas(options.device)) as kernels,
        made(copy_engines="always") as engines,
        # As agents have it, but for the room for tables.
        made(num_ctas=found.num_ctas, copy_engines="calibrated") as chosen,
    ):
        ways = (("kernels", kernels), ("copy engines", engines), ("as calibrated", chosen))
        device = torch.zeros(options.nbytes // 4, dtype=torch.uint8, device="cuda").random_()
        pinned = torch.zeros(options.nbytes // 4, dtype=torch.uint8, pin_memory=True).random_()
        directions: tuple[tuple[str, Direction, tuple[Any, Any]], ...] = (
            (_TO_HOST, "to_host", (device, torch.zeros_like(pinned, pin_memory=True))),
            (_TO_DEVICE, "to_device", (pinned, torch.zeros_like(device))),
        )
        for name, direction, between in directions:
            copies = [whole(name, *between, moved_once=True)]
            for kib in (4, 16, 64):
                pages = Pages(*between, kib * 1024)
                for how, stream in ways:
                    asked = 0.95 if kib >= 16 and stream is chosen else 0
                    copies.append(
                        pages.copy(name, "both", stream, asked=asked, named=how, direction=direction)
                    )
            _rows(copies, options)
        if not engines.has_copy_engines:
            words = "copy engines: the driver does not support batches of copies (CUDA 12.8) on this device"
            say("not run", words=words)


def between(index: int, options: Options) -> None:
    """What is read of another process's cache on this GPU, by one kind of handle."""
    kind = gpu_processes.KINDS[index]
    src = torch.zeros(options.nbytes, dtype=torch.uint8, device="cuda")
    limit = rate(whole(_DEVICE_COPY, src, torch.zeros_like(src)))
    for kib in (16, 64):
        sizes = options.nbytes, kib * 1024
        try:
            handles, rates, ratios = gpu_processes.measure(
                kind, options.device, *sizes, options.rounds, limit
            )
        except CheckFailedError as error:
            say("wrong", name=f"{kind.name}, {kib} KiB", words=str(error))
        except BenchError as error:
            say("not run", words=str(error))
        else:
            name = f"{kind.name}{'' if kind.how == handles else f' by {handles}'}, {kib} KiB"
            say("row", **asdict(Row.of(_BETWEEN, name, rates, ratios, asked=0.85)))


def triggers(options: Options) -> None:
    """From a stream's store to the first byte of a transfer that waits for it."""
    for delay in by_stream(options.device, _TRIGGER_ROUNDS):
        say("trigger", **asdict(delay))


def litmus(options: Options) -> None:
    """Message passing, kernels to host to stream and back."""
    for found in gpu_litmus.run(options.device, _LITMUS_ROUNDS):
        say("litmus", **asdict(found))
        if found.num_wrong and found.is_fenced:
            raise CheckFailedError(f"the litmus test fails although its fences are in place: {found}")


_MEASURES: Final[tuple[Callable[[Options], None], ...]] = (
    *(pages, litmus, triggers),
    *(functools.partial(between, index) for index in range(len(gpu_processes.KINDS))),
    *(layouts, host),
)
_GROUPS: Final = dict(zip(NAMES, _MEASURES, strict=True))


if __name__ == "__main__":
    sys.exit(run(Options(**json.loads(sys.argv[1]))))
