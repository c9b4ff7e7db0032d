"""``kvxfer bench pages``: pages of one size, or one rank's cache from ranks that hold it otherwise.

Beside them the shortest code that can move them (bench/run/limit.py); of layouts that differ also kvxfer's
own copy of as many bytes between two equal caches, and over tcp a message for each contiguous piece.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, Table, Words, number
from kvxfer.bench.run.certificates import self_signed
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.counters import Counters, counted
from kvxfer.bench.run.course import Progress, Say, result_of
from kvxfer.bench.run.limit import Limit, LimitSpec, limit_of_threads, limits_for, stream_pair
from kvxfer.bench.run.options import Corrupt, Option, Seed, Timeout, check, flag
from kvxfer.bench.run.perftest import Device, device_of, require_device
from kvxfer.bench.run.process import Worker, call_all
from kvxfer.bench.run.stats import GIB, KIB, MIB, median, median_ratio, spread
from kvxfer.bench.work.layout_names import NAMES
from kvxfer.bench.work.layout_pair import LayoutWork
from kvxfer.bench.work.models import Shape
from kvxfer.options import default_copy_threads
from kvxfer.tls import Tls

MOVED, PLAIN = "moved", "plain"

Total = Annotated[int, Option("Size of one transfer.", at_least=1)]
BlockKib = Annotated[int, Option("Size of one page; not used with layouts.", at_least=1)]
Op = Annotated[
    str, Option("The verb: the source writes, or the destination reads.", one_of=("write", "read"))
]
MemoryKind = Annotated[
    str,
    Option("Memory: a pool of kvxfer, or tensors that an engine allocated.", one_of=("pool", "foreign")),
]
Integrity = Annotated[bool, Option("Check each page with a checksum computed at both ends.")]
Iterations = Annotated[int, Option("Measured transfers, after one warm-up.", at_least=1)]
SrcLayout = Annotated[
    str, Option(f"Layout of the cache at the sources: names joined by +: {NAMES}.", value="LAYOUT")
]
DstLayout = Annotated[
    str, Option("Layout of the cache at the destination, named in the same way.", value="LAYOUT")
]
CopyThreads = Annotated[
    tuple[int, ...],
    Option("Copy threads at the destination; each number gives a row.", at_least=1),
]
WithTls = Annotated[
    bool,
    Option(
        "Also measure with certificates and with the kernel's TLS (kTLS); only over tcp, without layouts."
    ),
]
# Of one page, after each transfer.
_PAGE_REPEATS = 200
_TRANSPORTS = ("shm", "unix", "tcp", "verbs", "ucx", "libfabric")


@dataclass(frozen=True)
class PagesOptions:
    """Move pages of one size between two processes, interleaved with the machine's limit.

    With --src-layout and --dst-layout, move the cache of one rank between layouts that differ,
    interleaved with a plain copy of as many bytes.

    kvxfer bench pages --transport tcp --op read

    kvxfer bench pages --src-layout tp4 --dst-layout tp2
    """

    transport: Annotated[str, Option(f"The transport: {', '.join(_TRANSPORTS)}.", one_of=_TRANSPORTS)] = "shm"
    device: Device = ""
    op: Op = "write"
    total_mib: Total = 256
    block_kib: BlockKib = 32
    memory: MemoryKind = "pool"
    integrity: Integrity = False
    iterations: Iterations = 7
    src_layout: SrcLayout = ""
    dst_layout: DstLayout = ""
    shape: Shape = "Llama-3.1-70B"
    copy_threads: CopyThreads = (default_copy_threads(),)
    tls: WithTls = False
    seed: Seed = 1
    timeout_s: Timeout = 30.0
    corrupt: Corrupt = False

    def __post_init__(self) -> None:
        check(self)
        require_device(self.transport, self.device)
        if self.transport == "unix" and self.memory == "pool":
            raise BenchError(
                "--transport unix is for memory that shm cannot map: use it with --memory foreign"
            )
        if self.tls and (self.transport != "tcp" or self.has_layouts):
            raise BenchError("--tls needs --transport tcp, and pages without layouts")
        if self.has_layouts:
            for name in ("src_layout", "dst_layout"):
                if not getattr(self, name):
                    raise BenchError(f"{flag(name)} is missing: name the layouts of both ends")
            _ = self.work
        elif self.num_pages < 1:
            raise BenchError(f"--total-mib {self.total_mib} is too small for a page of {self.block_kib} KiB")

    @property
    def has_layouts(self) -> bool:
        return bool(self.src_layout or self.dst_layout)

    @cached_property
    def work(self) -> LayoutWork:
        """What layouts come to. Raises where nothing leads from one to the other."""
        layouts = (self.src_layout, self.dst_layout, self.shape)
        return LayoutWork.sized(*layouts, self.total_mib * MIB, self.seed)

    @property
    def page_nbytes(self) -> int:
        return self.work.plain.page_nbytes if self.has_layouts else self.block_kib * KIB

    @property
    def num_pages(self) -> int:
        """That move; of layouts that the limit moves: as many bytes as the transfer."""
        nbytes = self.work.src_nbytes if self.has_layouts else self.total_mib * MIB
        return nbytes // self.page_nbytes

    @property
    def total_nbytes(self) -> int:
        """Of one transfer, at the source."""
        return self.work.src_nbytes if self.has_layouts else self.num_pages * self.page_nbytes


def run(options: PagesOptions, progress: Say, counters: Counters | None = None) -> Message:
    """Runs it and returns the result as one JSON object; ratios are medians over iterations.

    Of layouts all rates count bytes at the source; ``ratio_to_plain`` is to kvxfer's own copy of as many
    bytes, and over tcp ``ratio_to_piecewise`` to a message for each of ``piecewise_pieces``. Where several
    ``copy_threads`` are named all is of the first, and ``rows`` has each, beside a plain non-temporal copy by
    as many threads. ``counters`` count the first pair's measured transfers.
    """
    if options.has_layouts:
        known, without = options.work.described(), {"block_kib"}
    else:
        known = {"num_pages": options.num_pages, "total_nbytes": options.total_nbytes}
        without = {"src_layout", "dst_layout", "shape"}
    result = result_of("pages", options, lambda: _measure(options, progress, counters), **known)
    return {name: value for name, value in result.items() if name not in without}


def _measure(options: PagesOptions, progress: Say, counters: Counters | None) -> Message:
    total, counts = options.iterations, options.copy_threads
    with ExitStack() as ended:
        progress(Progress(0, total, "setting up two agents" + (" of each" if len(counts) > 1 else "")))
        pairs = {count: _Pair(options, count, ended) for count in counts}
        first = pairs[counts[0]]
        first.counters = counters
        secured: dict[str, _Pair] = {}
        if options.tls:
            from kvxfer._native import kernel_tls  # without native modules a benchmark says so in a line

            files = self_signed(Path(ended.enter_context(tempfile.TemporaryDirectory())))
            secured["tls"] = _Pair(options, counts[0], ended, replace(files, kernel="never"))
            if kernel_tls()[0] != "nothing":
                secured["kernel_tls"] = _Pair(options, counts[0], ended, replace(files, kernel="always"))
        limit = Limit(_limits_of(options), first.source, first.destination)
        whats = (MOVED, PLAIN) if options.has_layouts else (MOVED,)
        pieces = None
        if options.has_layouts and options.transport == "tcp":
            pieces = _Piecewise(first.source, first.destination)
        turns: list[Callable[[int], None]] = [partial(first.transfer, what) for what in whats]
        turns += [partial(pairs[count].transfer, MOVED) for count in counts[1:]]
        turns += [partial(pair.transfer, MOVED) for pair in secured.values()]
        if len(counts) > 1 and not options.has_layouts:
            turns += [pair.read_one_page for pair in pairs.values()]
        turns.append(limit.run)
        # The first one warms up: page faults of the peer's mapping, compiled programs, TCP's window.
        for iteration in range(1 + total):
            progress(
                Progress(max(0, iteration - 1), total, f"iteration {iteration}" if iteration else "warm-up")
            )
            # What goes first is last in every second iteration.
            for turn in turns[:: -1 if iteration % 2 else 1]:
                turn(iteration)
            if pieces is not None:
                pieces.run(check=not iteration)
            if not iteration:
                limit.forget()
                for pair in (*pairs.values(), *secured.values()):
                    pair.forget()
    return {
        **_figures(options, first.moved, limit),
        **({} if pieces is None else pieces.figures(_rates(options, first.moved[MOVED]))),
        **{
            f"{who}_{name}": figure
            for who, pair in secured.items()
            for name, figure in _beside(options, pair, first).items()
        },
        **({"rows": list(_rows(options, pairs, limit))} if len(counts) > 1 else {}),
        **first.ready,
    }


def _limits_of(options: PagesOptions) -> LimitSpec:
    names = limits_for(options.transport, options.memory)
    if options.has_layouts:
        names = names[:1]
    if len(options.copy_threads) > 1 and (options.transport, options.memory) == ("shm", "pool"):
        wanted = (limit_of_threads(count) for count in options.copy_threads)
        names += tuple(name for name in wanted if name not in names)
    device = device_of(options.transport, options.device)
    return LimitSpec(names, options.page_nbytes, options.num_pages, options.seed, device)


class _Pair:
    """Two workers whose agents copy by so many threads, and what they moved."""

    #: Count what the transfers take.
    counters: Counters | None = None

    def __init__(
        self, options: PagesOptions, copy_threads: int, ended: ExitStack, tls: Tls | None = None
    ) -> None:
        kind = "LayoutPages" if options.has_layouts else "PlainPages"
        fields = {**asdict(options), "copy_threads": (copy_threads,)}
        if tls is not None:
            fields["files"] = {
                "certificate": str(tls.certificate),
                "key": str(tls.key),
                "authorities": str(tls.authorities),
                "kernel": tls.kernel,
            }
        self._options = options
        self.source, self.destination = (
            ended.enter_context(Worker(f"pages.ends:{kind}", {**fields, "role": role}, role))
            for role in ("source", "destination")
        )
        ready = call_all((self.source, self.destination), "open")
        self.ready = {name: ready[1][name] for name in ("copy_kernel", "page_kind")}
        # Who posts is who calls.
        ends = (self.source, self.destination)
        active, passive = ends if options.op == "write" else ends[::-1]
        active.call("connect", address=passive.call("address")["address"])
        passive.call("accept")
        self.forget()

    def forget(self) -> None:
        """Drops the times so far, as those of a warm-up."""
        self.moved: dict[str, list[Message]] = {}
        self.page_ns: list[int] = []
        if self.counters is not None:
            self.counters.forget()

    def transfer(self, what: str, iteration: int) -> None:
        moved = _transfer(self._options, what, iteration, self.source, self.destination, self.counters)
        self.moved.setdefault(what, []).append(moved)

    def read_one_page(self, iteration: int) -> None:
        self.source.call("serve_begin")
        self.page_ns.append(self.destination.call("read_one_page", repeats=_PAGE_REPEATS)["page_ns"])


def _beside(options: PagesOptions, secured: _Pair, plain: _Pair) -> Message:
    """What pages with certificates cost beside those without."""
    ours, its = secured.moved[MOVED], plain.moved[MOVED]
    rates = _rates(options, ours)
    return {
        "gb_s": median(rates),
        "ratio": median_ratio(rates, _rates(options, its)),
        "cpu_s_per_gib": _cpu_s_per_gib(options, ours),
    }


def _cpu_s_per_gib(options: PagesOptions, moved: list[Message]) -> float:
    return median(one["cpu_ns"] / 1e9 * GIB / options.total_nbytes for one in moved)


def _rows(options: PagesOptions, pairs: dict[int, _Pair], limit: Limit) -> Iterator[Message]:
    rates = {count: _rates(options, pair.moved[MOVED]) for count, pair in pairs.items()}
    first = options.copy_threads[0]
    for count, pair in pairs.items():
        row: Message = {
            "copy_threads": count,
            "gb_per_s": median(rates[count]),
            "ratio_to_first": median_ratio(rates[count], rates[first]),
        }
        if (name := limit_of_threads(count)) in limit.spec.names:
            its = limit.rates(name)
            row |= {"limit_gb_s": median(its), "ratio_to_limit": median_ratio(rates[count], its)}
        if pair.page_ns:
            row |= {
                "page_us": median(each / 1e3 for each in pair.page_ns),
                "page_ratio_to_first": median_ratio(pair.page_ns, pairs[first].page_ns),
            }
        yield row


def _transfer(
    options: PagesOptions,
    what: str,
    iteration: int,
    source: Worker,
    destination: Worker,
    counters: Counters | None,
) -> Message:
    """Moves the pages once: fill and clear, move, check that the right bytes came by the right way."""
    told: Message = {"what": what, "iteration": iteration}
    source.call("fill", iteration=iteration)
    destination.call("clear", what=what)
    with counted(counters, source.pid, destination.pid):
        if options.op == "write":
            destination.send("expect", **told)
            destination.reply()  # it waits now, and replies again at the end
            active, passive = source.call("write", **told), destination.reply()
        else:
            source.call("serve_begin")
            active, passive = destination.call("read", **told), source.call("serve_end")
    if wrong := destination.call("check", **told, corrupt=options.corrupt)["wrong"]:
        raise CheckFailedError(f"iteration {iteration} of {options.op} over {options.transport}: {wrong}")
    # The destination moves the bytes, so it is the one that knows how they came.
    rails = (passive if options.op == "write" else active)["rails"]
    if set(rails) != {options.transport}:
        went = ", ".join(rails) or "no rail"
        raise CheckFailedError(f"{options.transport} was chosen, but the bytes went over {went}")
    return {**active, "rails": rails, "cpu_ns": active["cpu_ns"] + passive["cpu_ns"]}


class _Piecewise:
    """The coordinator's view of the same bytes sent piece by piece."""

    def __init__(self, source: Worker, destination: Worker) -> None:
        self._source, self._destination = source, destination
        self._elapsed_ns: list[int] = []
        ours, theirs = stream_pair("tcp")
        with ours, theirs:
            self._pieces = source.call("pieces_source", descriptors=(ours.fileno(),))
            stream_nbytes = self._pieces.pop("stream_nbytes")
            destination.call("pieces_destination", (theirs.fileno(),), stream_nbytes=stream_nbytes)

    def run(self, check: bool) -> None:
        """Moves them once, and keeps the time; the first one is checked, and warms up."""
        self._destination.call("clear", what=PLAIN)
        self._destination.send("pieces_receive")
        start_ns = self._source.call("pieces_send")["start_ns"]
        self._elapsed_ns.append(self._destination.reply()["end_ns"] - start_ns)
        if check:
            self._elapsed_ns.clear()
            part = {name: self._pieces[name] for name in ("layers", "tokens")}
            if wrong := self._destination.call("pieces_check", **part)["wrong"]:
                raise CheckFailedError(f"sending piece by piece itself moved wrong bytes: {wrong}")

    def figures(self, rates: list[float]) -> Message:
        """Returns its rate, and how many times faster the transfers beside it were."""
        its = [self._pieces["nbytes"] / each for each in self._elapsed_ns]
        shown = ("pieces", "nbytes", "layers", "tokens")
        return {
            "piecewise_gb_s": median(its),
            "ratio_to_piecewise": median_ratio(rates, its),
            **{f"piecewise_{name}": self._pieces[name] for name in shown},
        }


def _rates(options: PagesOptions, moved: list[Message]) -> list[float]:
    return [options.total_nbytes / one["total_ns"] for one in moved]


def _figures(options: PagesOptions, moved: dict[str, list[Message]], limit: Limit) -> Message:
    ours = moved[MOVED]
    rates = _rates(options, ours)
    found = {
        "total_ms": spread(one["total_ns"] / 1e6 for one in ours),
        "gb_per_s": spread(rates),
        "post_ms": median(one["post_ns"] / 1e6 for one in ours),
        **limit.figures(rates),
        "cpu_s_per_gib": _cpu_s_per_gib(options, ours),
        "rails": ours[-1]["rails"],
    }
    if PLAIN in moved:
        plain = _rates(options, moved[PLAIN])
        found |= {"plain_gb_s": median(plain), "ratio_to_plain": median_ratio(rates, plain)}
    return found


def parts(result: Message) -> Iterator[Part]:
    """Yields what a result is shown as."""
    over = f"{result['op']} over {result['transport']}"
    if result["integrity"]:
        over += ", with checksums"
    if "plain_gb_s" not in result:
        yield Words(
            f"{over}: {result['num_pages']} pages of {result['block_kib']} KiB, {result['memory']} memory",
            "bold",
        )
        yield shown.spreads(result)
        yield from shown.limits(result)
        yield shown.cost(result)
        for who, words in (("tls", "with certificates"), ("kernel_tls", "with certificates, by the kernel")):
            if f"{who}_gb_s" in result:
                yield Words(
                    f"{words}: {result[f'{who}_gb_s']:.2f} GB/s, {result[f'{who}_ratio']:.2f} of the rate "
                    f"without, {result[f'{who}_cpu_s_per_gib']:.3f} CPU s/GiB at both ends"
                )
        yield from _shown_rows(result)
        return
    yield Words(
        f"{over}, {result['src_layout']} -> {result['dst_layout']}: {result['num_tokens']} tokens in "
        f"{result['layers']} layers of {result['shape']}, to one rank from {result['num_sources']}, "
        f"{result['memory']} memory; {result['src_nbytes'] / MIB:.1f} MiB at the "
        f"source, {result['dst_nbytes'] / MIB:.1f} at the destination",
        "bold",
    )
    yield Words(result["explain"], "dim")
    yield shown.spreads(result)
    yield Words(
        f"plain copy: {result['plain_gb_s']:.2f} GB/s (kvxfer, as many bytes between equal layouts); ratio "
        f"to this {result['ratio_to_plain']:.2f}"
    )
    yield from shown.limits(result)
    if "ratio_to_piecewise" in result:
        yield Words(
            f"piece by piece: {result['piecewise_gb_s']:.2f} GB/s (a message for each of "
            f"{result['piecewise_pieces']} pieces, {result['piecewise_nbytes'] / MIB:.1f} MiB, one loopback "
            f"TCP stream); ratio to this {result['ratio_to_piecewise']:.1f}"
        )
    yield shown.cost(result, "bytes checked: all of the warm-up, then one layer of each transfer")
    yield from _shown_rows(result)


def _shown_rows(result: Message) -> Iterator[Part]:
    rows = result.get("rows", [])
    if rows:
        yield Table(tuple(rows[0]), [tuple(number(each) for each in row.values()) for row in rows])
        yield Words("  limit: a plain non-temporal copy of as many bytes with as many threads", "dim")
