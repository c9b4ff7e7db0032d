"""``kvxfer bench store``: pages from memory into a directory's files and back, beside fio on that disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import psutil

from kvxfer.bench.errors import BenchError
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, Table, Words, number, spread_in_words
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.options import Option, Seed, check
from kvxfer.bench.run.process import Worker
from kvxfer.bench.run.stats import GIB, KIB, MIB, spread
from kvxfer.bench.store import fio, opening_end, slot_heads
from kvxfer.bench.store.page_traffic import PageTraffic

# Each page moves so often in a run, which then takes about a second.
_PASSES: Final = 2
_BOTH_S: Final = 1.5
_OPENINGS: Final = 3
_OPENED_PAGE_NBYTES: Final = 256 * KIB
_LOOK_UPS: Final = 200
_KEYS: Final = 4096
# What a disk keeps free for others.
_MARGIN_NBYTES: Final = GIB
_HEAD_NBYTES: Final = 256

#: figure -> what is asked of it, and what it means.
FIGURES = {
    "read_ratio": ("0.85", "files to memory: rate / fio's, in turns"),
    "write_ratio": ("0.85", "memory to files: rate / fio's, in turns"),
    "read_cpu_ratio": ("<= 1.3", "processor time of this process for a GiB read / that of fio's threads"),
    "read_share": ("0.4", "reading while pages are written: rate / that of reading alone"),
    "write_share": ("0.4", "writing while pages are read: rate / that of writing alone"),
    "read_gb_s": ("", "files to memory"),
    "fio_read_gb_s": ("", "the same, fio"),
    "write_gb_s": ("", "memory to files"),
    "fio_write_gb_s": ("", "the same, fio"),
    "read_cpu_s_per_gib": ("", "processor time for a GiB read: threads with their checksums, and the caller"),
    "caller_cpu_s_per_gib": ("", "of these the caller's loop, in Python"),
    "fio_read_cpu_s_per_gib": ("", "the same, fio, which checks nothing"),
}
OPENED = {
    "open_cold_s": ("<= 5", "opens the directory, whose heads lie on the disk alone"),
    "open_s": ("", "opens it again"),
    "nbytes_per_page": ("<= 100", "memory that the process has more, for each page"),
    "look_up_ms": ("<= 1", f"one look-up of {_KEYS} keys, all of them there, in random order"),
}


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Write pages into a directory's files and read them back, beside fio; then open a directory of many.

    kvxfer bench store --pages-dir /var/lib/kvxfer

    kvxfer bench store --page-kib 2048 --fio ''
    """

    pages_dir: Annotated[
        str,
        Option(
            "Where to make files, which are removed in the end; the default is the directory of temporary "
            "files.",
            value="DIR",
        ),
    ] = ""
    page_kib: Annotated[tuple[int, ...], Option("Sizes of pages.", at_least=4)] = (256, 2048)
    total_mib: Annotated[int, Option("Bytes of the pages in the files.", at_least=1)] = 512
    memory: Annotated[
        str,
        Option(
            "The pool's memory: huge pages, as a daemon's, or base pages, as fio's.", one_of=("huge", "base")
        ),
    ] = "huge"
    slots: Annotated[int, Option("Pages of the directory that is opened.", at_least=1)] = 1_000_000
    iterations: Annotated[int, Option("How often to measure each, in turns.", at_least=1)] = 9
    fio: Annotated[str, Option("The program fio; empty for none.", value="PROGRAM")] = "fio"
    seed: Seed = 1

    def __post_init__(self) -> None:
        check(self)
        for each in self.page_kib:
            if each % 4 != 0 or each * KIB * 8 > self.total_mib * MIB:
                raise BenchError(
                    f"--page-kib {each} must be a multiple of 4, and --total-mib hold 8 such pages or more"
                )

    @property
    def needed_nbytes(self) -> int:
        """How much of the disk it takes at most."""
        return max(self.total_mib * MIB, self.slots * _HEAD_NBYTES) + _MARGIN_NBYTES


def run(options: StoreOptions, progress: Say) -> Message:
    """Runs it and returns the result (`FIGURES`, `OPENED`) as one JSON object."""
    parent = Path(options.pages_dir or tempfile.gettempdir())
    if not parent.is_dir():
        raise BenchError(f"--pages-dir {parent} is not a directory: make it, or name another one")
    free = shutil.disk_usage(parent).free
    if free < options.needed_nbytes:
        raise BenchError(
            f"{parent} has {free / GIB:.1f} GiB free, and {options.needed_nbytes / GIB:.1f} are needed: name "
            "another --pages-dir, or use less --total-mib or --slots"
        )
    program, words = fio.find(options.fio)
    known = {"file_system": _file_system(parent), "fio_version" if program else "fio_missing": words}

    def measure() -> Message:
        with tempfile.TemporaryDirectory(prefix="kvxfer-bench-store-", dir=parent) as made:
            return _measure(options, Path(made), program, progress)

    return result_of("store", options, measure, **known)


def parts(result: Message) -> Iterator[Part]:
    """Yields the parts that show a result."""
    yield shown.arguments(result, "rows", "opened", "fio_missing", "why_not_direct")
    if "fio_missing" in result:
        yield Words(f"nothing to compare with: {result['fio_missing']}", "warn")
    if result["why_not_direct"]:
        yield Words(f"pages went through the page cache: {result['why_not_direct']}", "warn")
    for row in result["rows"]:
        beside = (
            f"; fio reads with {row['fio_read']}, writes with {row['fio_write']}" if "fio_read" in row else ""
        )
        yield Words(f"pages of {row['page_kib']} KiB{beside}", "bold")
        yield _table(row, FIGURES)
    yield Words(f"a directory of {result['opened']['slots']} pages", "bold")
    yield _table(result["opened"], OPENED)


def _table(figures: Message, meanings: dict[str, tuple[str, str]]) -> Table:
    rows = [
        (
            name.replace("_", " "),
            spread_in_words(found) if isinstance(found, dict) else number(found),
            asked,
            Words(meaning, "dim"),
        )
        for name, (asked, meaning) in meanings.items()
        if (found := figures.get(name)) is not None
    ]
    return Table(("", "median (min to max)", "asked", ""), rows)


def _measure(options: StoreOptions, directory: Path, program: str, progress: Say) -> Message:
    steps = len(options.page_kib) * (options.iterations + 1) + 1
    done = 0

    def step(words: str) -> None:
        nonlocal done
        progress(Progress(done, steps, words))
        done += 1

    rows = []
    for page_kib in options.page_kib:
        files = directory / f"pages-{page_kib}"
        nbytes = options.total_mib * MIB // (page_kib * KIB) * page_kib * KIB
        step(f"filling the files with pages of {page_kib} KiB")
        traffic = PageTraffic(
            files,
            nbytes // (page_kib * KIB),
            page_kib * KIB,
            options.seed,
            huge_pages=options.memory == "huge",
        )
        try:
            traffic.write_all()
            other = fio.Fio(program, sorted(files.glob("*.pages")), _PASSES) if program else None
            rows.append({"page_kib": page_kib} | _compare(options, page_kib, traffic, other, step))
            facts = {"why_not_direct": traffic.why_not_direct, "page_kind": traffic.page_kind}
        finally:
            traffic.close()
            shutil.rmtree(files)
    step(f"opening a directory of {options.slots} pages")
    return {**facts, "rows": rows, "opened": _open(options, directory / "opened")}


def _compare(
    options: StoreOptions, page_kib: int, traffic: PageTraffic, other: fio.Fio | None, step: Any
) -> Message:
    """Writes and reads in turns with fio, then does both at once, and checks the bytes first and last."""
    page_nbytes = page_kib * KIB
    traffic.read_all(checks=True)
    best: dict[fio.Way, fio.Setting] = {}
    ways: tuple[fio.Way, fio.Way] = ("write", "read")
    if other is not None:
        step(f"looking for fio's best depth for {page_kib} KiB")
        for way in ways:
            found = {each: other.run(way, page_nbytes, each).gb_s for each in other.settings(page_nbytes)}
            best[way] = max(found, key=lambda each: found[each])
    rates: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        rates.setdefault(name, []).append(value)

    for iteration in range(options.iterations):
        step(f"pages of {page_kib} KiB: write, read, both")
        for way in ways:
            for turn in ("ours", "fio") if iteration % 2 == 0 else ("fio", "ours"):
                if turn == "ours":
                    moved = [
                        traffic.write_all() if way == "write" else traffic.read_all() for _ in range(_PASSES)
                    ]
                    add(f"{way}_gb_s", _PASSES / sum(1 / each.gb_s[way] for each in moved))
                    add(f"{way}_cpu_s_per_gib", sum(each.cpu_s_per_gib for each in moved) / _PASSES)
                    if way == "read":
                        add(
                            "caller_cpu_s_per_gib", sum(each.caller_cpu_s_per_gib for each in moved) / _PASSES
                        )
                elif other is not None:
                    # Pages are not whole after it has written, and are written again before they are read.
                    theirs = other.run(way, page_nbytes, best[way])
                    add(f"fio_{way}_gb_s", theirs.gb_s)
                    add(f"fio_{way}_cpu_s_per_gib", theirs.cpu_s_per_gib)
            if way == "write" and other is not None:
                traffic.write_all()
        both = traffic.both(_BOTH_S)
        for way in ways:
            add(f"{way}_share", both.gb_s[way] / rates[f"{way}_gb_s"][-1])
    traffic.write_all()
    traffic.read_all(checks=True)
    for way in ways:
        if other is not None:
            rates[f"{way}_ratio"] = _ratios(rates, f"{way}_gb_s")
    if other is not None:
        rates["read_cpu_ratio"] = _ratios(rates, "read_cpu_s_per_gib")
    return {f"fio_{way}": str(setting) for way, setting in best.items()} | {
        name: spread(values) for name, values in rates.items()
    }


def _ratios(rates: dict[str, list[float]], name: str) -> list[float]:
    return [mine / its for mine, its in zip(rates[name], rates[f"fio_{name}"], strict=True)]


def _open(options: StoreOptions, directory: Path) -> Message:
    """Makes a directory, and opens it in new processes with its heads on the disk and in the page cache."""
    slot_heads.make(directory, options.slots, _OPENED_PAGE_NBYTES, options.seed)
    fields = {
        "directory": str(directory),
        "num_pages": options.slots,
        "page_nbytes": _OPENED_PAGE_NBYTES,
        "seed": options.seed,
    }
    opened: dict[str, list[float]] = {
        "open_cold_s": [],
        "open_s": [],
        "nbytes_per_page": [],
        "look_up_ms": [],
    }
    for _ in range(min(_OPENINGS, options.iterations)):
        for name in ("open_cold_s", "open_s"):
            if name == "open_cold_s":
                slot_heads.forget(directory)
            with Worker(f"{opening_end.__name__.removeprefix('kvxfer.bench.')}:OpeningEnd", fields) as end:
                found = end.call("open")
                opened[name].append(found["open_s"])
                opened["nbytes_per_page"].append(found["nbytes_per_page"])
                opened["look_up_ms"] += end.call("look_up", num_keys=_KEYS, times=_LOOK_UPS)["took_ms"]
    return {"slots": options.slots, **{name: spread(values) for name, values in opened.items()}}


def _file_system(directory: Path) -> str:
    """Returns the type and the device of the file system that a directory is in."""
    inside = directory.resolve()
    mounts = [
        each for each in psutil.disk_partitions(all=True) if inside.is_relative_to(Path(each.mountpoint))
    ]
    # Of several at one place the last is the one that is seen.
    place = max(enumerate(mounts), key=lambda each: (len(each[1].mountpoint), each[0]), default=None)
    return f"{place[1].fstype} on {place[1].device}" if place else "unknown"
