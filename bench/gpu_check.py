"""``make gpu-check``: what copies on this machine's GPU reach, beside limits of the same run.

Runs where CUDA, torch and numpy are and nothing else of the benchmarks' libraries. Every copy is checked
before it is measured. Rounds go through all copies in turn, so that a clock that changes changes them all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.bench import gpu_litmus, machine
from kvxfer.bench.errors import BenchError
from kvxfer.bench.gpu_commands import by_kernel
from kvxfer.bench.stats import MIB
from kvxfer.bench.trigger import by_stream
from kvxfer.errors import UsageError
from kvxfer.gpu.availability import availability

EXIT_WRONG, EXIT_NO_GPU = 1, 3

_DEVICE_COPY, _TO_HOST, _TO_DEVICE = "device to device", "device to host", "host to device"
_CTAS = (1, 2, 4, 8, 16, 32, 132)
# A measurement lasts this long, so that what it takes to begin and end one is nothing.
_LEAST_S = 0.02
# Of copies that follow each other without a pause.
_TABLES_NBYTES = 64 * MIB
_MATRIX = 8192
_NUM_PRODUCTS = 20
_TRIGGER_ROUNDS = 500
_LITMUS_ROUNDS = 2000
# What is asked of a trigger from a stream to an agent that spins.
_TRIGGER_US, _ASKED_OF = 5.0, "store, spinning"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    group: str
    name: str
    gb_per_s: float
    ratio: float
    least: float
    most: float
    asked: float


def main() -> int:
    """Prints the table and returns an exit status: 0, 1 where bytes were wrong, 3 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kvxfer.bench.gpu_check", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="which GPU")
    parser.add_argument("--total-mib", type=int, default=1024, help="bytes of a copy of pages")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured")
    parser.add_argument("--out", type=Path, help="a file for the result as JSON")
    options = parser.parse_args()
    found = availability(options.device)
    if not found.usable:
        print(f"gpu-check: nothing was measured: {found.reason}", file=sys.stderr)
        return EXIT_NO_GPU
    try:
        result = run(options.device, options.total_mib * MIB, options.rounds)
    except BenchError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return EXIT_WRONG
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_table(result)
    return 0


def run(device: int, nbytes: int, rounds: int) -> dict[str, Any]:
    """Measures everything; returns what `print_table` prints."""
    import torch

    from kvxfer.bench.gpu_stores import stores
    from kvxfer.gpu import calibration
    from kvxfer.gpu.copy_stream import CopyStream

    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    rows = []
    with (
        CopyStream(
            device, num_ctas=2 * properties.multi_processor_count, tables_nbytes=_TABLES_NBYTES
        ) as best,
        CopyStream(
            device, num_ctas=2 * properties.multi_processor_count, bulk=False, tables_nbytes=_TABLES_NBYTES
        ) as vectors,
        CopyStream(device, tables_nbytes=_TABLES_NBYTES, copy_engines="always") as engines,
        # As agents have it, but for the room for tables.
        CopyStream(device, tables_nbytes=_TABLES_NBYTES, copy_engines="calibrated") as chosen,
    ):
        for copies in _copies(nbytes, best, vectors):
            rows += _measure(copies, rounds)
        for copies in _host_copies(nbytes // 4, best, engines, chosen):
            rows += _measure(copies, rounds)
        not_run = (
            []
            if engines.has_copy_engines
            else ["copy engines: the driver has no batches of copies (CUDA 12.8) for this device"]
        )
        slowdowns = _beside_products(device, nbytes)
    between, unread = _between_processes(device, nbytes, rounds)
    rows += between
    not_run += unread
    try:
        with stores(device, nbytes // 4, (16 * 1024, 64 * 1024), (4, 16, 132), _DEVICE_COPY) as stored:
            rows += _measure(stored, rounds)
    except UsageError as error:
        not_run.append(f"pages that a kernel stores: {error}")
    triggers = by_stream(device, _TRIGGER_ROUNDS)
    commands = by_kernel(device, _TRIGGER_ROUNDS)
    litmus = gpu_litmus.run(device, _LITMUS_ROUNDS)
    if litmus[0].num_wrong:
        raise BenchError(f"the litmus test fails with its fences: {litmus[0]}")
    return {
        "bench": "gpu-check",
        "date": date.today().isoformat(),
        "gpu": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "machine": machine.describe(),
        "total_mib": nbytes // MIB,
        "rounds": rounds,
        "rows": [{name: getattr(row, name) for name in Row.__slots__} for row in rows],
        "beside_products": slowdowns,
        "not_run": not_run,
        "host_copies": [asdict(choice) for choice in calibration.shared(device).choices()],
        "triggers": [asdict(delay) for delay in triggers],
        "commands": [asdict(delay) for delay in commands],
        "litmus": [asdict(each) for each in litmus],
    }


def _copies(nbytes: int, best: Any, vectors: Any) -> Iterator[list[Any]]:
    """Yields what is measured in turns, each with its limit first."""
    import torch

    from kvxfer.bench.gpu_copies import Pages, layouts, whole

    src = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    dst = torch.zeros_like(src)
    limit = whole(_DEVICE_COPY, src, dst)
    pages = {kib: Pages(src, dst, kib * 1024) for kib in (4, 16, 64)}
    copies = [limit]
    for kib, of_size in pages.items():
        asked = 0.9 if kib >= 16 else 0
        for how in ("gather", "scatter", "both"):
            copies.append(of_size.copy("pages", how, best, _DEVICE_COPY, asked=asked))
        copies.append(of_size.copy("pages", "both", vectors, _DEVICE_COPY, named="both, by vectors"))
    copies += pages[16].torch_copies("pages", _DEVICE_COPY)
    yield copies

    yield [limit] + [
        pages[16].copy("CTAs", "both", stream, _DEVICE_COPY, num_ctas=ctas, named=f"{ctas} CTAs, {name}")
        for ctas in _CTAS
        for name, stream in (("bulk", best), ("vectors", vectors))
    ]
    best.set_num_ctas(2 * torch.cuda.get_device_properties(src.device).multi_processor_count)

    quarter = nbytes // 4
    yield [limit] + [
        layouts(before, after, quarter, best, _DEVICE_COPY, asked)
        for before, after, asked in (
            ("nhd", "hnd", 0.8),
            ("hnd", "nhd", 0.8),
            ("tp4+nhd", "tp2+nhd", 0.8),
            ("tp4+hnd", "tp2+hnd", 0.8),
            ("bf16", "fp8", 0.75),
            ("fp8", "bf16", 0),
            ("bf16", "fp8+per-page", 0),
        )
    ]


def _host_copies(nbytes: int, best: Any, engines: Any, chosen: Any) -> Iterator[list[Any]]:
    """The same between the device and pinned memory: by kernels, by copy engines, and as calibrated."""
    import torch

    from kvxfer.bench.gpu_copies import Pages, whole
    from kvxfer.gpu.copy_stream import Direction

    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda").random_()
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).random_()
    ways: tuple[tuple[str, Direction, tuple[Any, Any]], ...] = (
        (_TO_HOST, "to_host", (device, torch.zeros_like(host, pin_memory=True))),
        (_TO_DEVICE, "to_device", (host, torch.zeros_like(device))),
    )
    for name, direction, between in ways:
        copies = [whole(name, *between, moved_once=True)]
        for kib in (4, 16, 64):
            pages = Pages(*between, kib * 1024)
            for how, stream in (("kernels", best), ("copy engines", engines), ("as calibrated", chosen)):
                asked = 0.95 if kib >= 16 and stream is chosen else 0
                copies.append(
                    pages.copy(name, "both", stream, name, asked=asked, named=how, direction=direction)
                )
        yield copies


def _measure(copies: list[Any], rounds: int) -> list[Row]:
    """Checks each, then measures all of them round by round."""
    import torch

    repeats = []
    for copy in copies:
        copy.dst.zero_()
        torch.cuda.synchronize()
        copy.submit()
        copy.stream.synchronize()
        copy.check()
        repeats.append(max(1, int(_LEAST_S / max(_seconds(copy, 3) / 3, 1e-6))))
    rates: dict[str, list[float]] = {copy.name: [] for copy in copies}
    for _ in range(rounds):
        for copy, count in zip(copies, repeats, strict=True):
            rates[copy.name].append(copy.nbytes * count / _seconds(copy, count) / 1e9)
    rows = []
    for copy in copies:
        ratios = np.array(rates[copy.name]) / np.array(rates[copy.limit or copy.name])
        rows.append(
            Row(
                copy.group,
                copy.name,
                round(float(np.median(rates[copy.name])), 1),
                round(float(np.median(ratios)), 3),
                round(float(ratios.min()), 3),
                round(float(ratios.max()), 3),
                copy.asked,
            )
        )
    return rows


def _seconds(copy: Any, count: int) -> float:
    """Returns what the device takes for `count` of them, one after the other."""
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record(copy.stream)
    for _ in range(count):
        copy.submit()
    last.record(copy.stream)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _beside_products(device: int, nbytes: int) -> list[dict[str, Any]]:
    """Returns how much slower a copy and matrix products are together than alone, by priority and CTAs."""
    import torch

    from kvxfer.bench.gpu_copies import Pages
    from kvxfer.gpu.copy_stream import CopyStream

    a, b = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    src = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    pages = Pages(src, torch.zeros_like(src), 16 * 1024)
    model = torch.cuda.Stream()

    def products() -> None:
        with torch.cuda.stream(model):
            for _ in range(_NUM_PRODUCTS):
                torch.matmul(a, b, out=out)

    results = []
    for high in (False, True):
        for ctas in (4, 16):
            with CopyStream(device, num_ctas=ctas, high_priority=high) as stream:
                copy = pages.copy("", "both", stream, "")
                alone = _together(products, None, model, copy.stream)
                copy_alone = _together(None, copy.submit, model, copy.stream)
                both = _together(products, copy.submit, model, copy.stream)
                results.append(
                    {
                        "priority": "high" if high else "default",
                        "num_ctas": ctas,
                        "products": round(both[0] / alone[0], 3),
                        "copy": round(both[1] / copy_alone[1], 3),
                    }
                )
    return results


def _between_processes(device: int, nbytes: int, rounds: int) -> tuple[list[Row], list[str]]:
    """Returns what another process's cache on this GPU is read with, and what could not be read, in words."""
    import torch

    from kvxfer.bench.errors import CheckFailedError
    from kvxfer.bench.gpu_copies import whole
    from kvxfer.bench.gpu_processes import KINDS, measure

    src = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    copy = whole(_DEVICE_COPY, src, torch.zeros_like(src))
    count = max(1, int(_LEAST_S / max(_seconds(copy, 3) / 3, 1e-6)))

    def limit() -> float:
        return copy.nbytes * count / _seconds(copy, count) / 1e9

    rows, not_run = [], []
    for kind in KINDS:
        for kib in (16, 64):
            try:
                handles, rates, ratios = measure(kind, device, nbytes, kib * 1024, rounds, limit)
            except CheckFailedError:
                raise
            except BenchError as error:
                not_run.append(str(error))
                continue
            name = f"{kind.name}{'' if kind.how == handles else f' by {handles}'}, {kib} KiB"
            rows.append(
                Row(
                    "another process's pages on this GPU, which is no NVLink",
                    name,
                    round(float(np.median(rates)), 1),
                    round(float(np.median(ratios)), 3),
                    round(min(ratios), 3),
                    round(max(ratios), 3),
                    0.85,
                )
            )
    return rows, not_run


def _together(products: Any, copy: Any, model: Any, copies: Any) -> tuple[float, float]:
    """Returns seconds of the products and of one copy, begun at the same time; medians of five."""
    import torch

    taken = []
    for _ in range(6):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        for work, stream, first, last in (
            (products, model, events[0], events[1]),
            (copy, copies, events[2], events[3]),
        ):
            first.record(stream)
            if work is not None:
                work()
            last.record(stream)
        torch.cuda.synchronize()
        taken.append([events[k].elapsed_time(events[k + 1]) / 1e3 for k in (0, 2)])
    medians = np.median(np.array(taken[1:]), axis=0)
    return float(medians[0]), float(medians[1])


def print_table(result: dict[str, Any]) -> None:
    """Prints a result as lines of plain text."""
    print(
        f"\n{result['gpu']}, torch {result['torch']}, CUDA {result['cuda']}, {result['date']}: "
        f"copies of {result['total_mib']} MiB, medians of {result['rounds']} rounds\n"
        "GB/s are read + written on the device, moved once to and from the host\n"
    )
    print(f"{'':36}{'GB/s':>9}{'of limit':>10}{'(from - to)':>16}{'asked':>8}")
    group = ""
    for row in result["rows"]:
        if row["group"] != group:
            group = row["group"]
            print(group)
        spread = f"({row['least']:.2f} - {row['most']:.2f})"
        asked = (
            "" if not row["asked"] else f"{row['asked']:.2f}{'' if row['ratio'] >= row['asked'] else ' *'}"
        )
        print(f"  {row['name']:34}{row['gb_per_s']:9.1f}{row['ratio']:10.3f}{spread:>16}{asked:>8}")
    print("a copy and matrix products together, times slower than alone")
    for row in result["beside_products"]:
        print(
            f"  {row['priority']} priority, {row['num_ctas']:2} CTAs"
            f"{'':8}products {row['products']:.2f}, copy {row['copy']:.2f}"
        )
    print("pages between device and host memory, as calibrated: by copy engines")
    for choice in result["host_copies"]:
        way = f"{'to' if choice['to_host'] else 'from'} the host, {choice['form']}"
        loose = "" if choice["aligned"] else " not on 16 bytes"
        least = choice["least_nbytes"]
        print(f"  {way + loose:34}{'never' if least is None else f'from {least // 1024} KiB on':>16}")
    for words in result["not_run"]:
        print(f"not run: {words}")
    print("from a stream's store to the first byte of a transfer that waits for it, us")
    missed = sum(row["ratio"] < row["asked"] for row in result["rows"])
    for row in result["triggers"]:
        late = row["name"] == _ASKED_OF and row["p50_us"] > _TRIGGER_US
        missed += late
        asked = "" if row["name"] != _ASKED_OF else f"{_TRIGGER_US:8.1f}{' *' if late else ''}"
        print(f"  {row['name']:34}p50 {row['p50_us']:.1f}, p99 {row['p99_us']:.1f}{asked}")
    print("a transfer of 16 KiB that a kernel starts, as it sees it, us")
    for row in result["commands"]:
        print(f"  {row['name']:34}p50 {row['p50_us']:.1f}, p99 {row['p99_us']:.1f}")
    print("message passing, kernels to host to stream and back: words that were not as they had been stored")
    for row in result["litmus"]:
        print(
            f"  {row['name']:34}{row['at_host']} at the host, {row['at_stream']} behind a stream's wait, "
            f"{row['of_host']} of the host's, in {row['num_rounds']} rounds"
        )
    print(
        f"\n{missed} of what was asked is below (*)" if missed else "\neverything that was asked is reached"
    )


if __name__ == "__main__":
    sys.exit(main())
