"""``kvxfer bench``: options in, progress and a table or a line of JSON out."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.bench.compare import measure as compare_bench
from kvxfer.bench.handover import measure as handover_bench
from kvxfer.bench.handover import page as handover_page
from kvxfer.bench.handover.stages import Handover
from kvxfer.bench.latency import measure as latency_bench
from kvxfer.bench.pages import layouts as layout_bench
from kvxfer.bench.pages import measure as pages_bench
from kvxfer.bench.pages import moves as page_moves
from kvxfer.bench.plan import layouts as layout_plan_bench
from kvxfer.bench.plan import measure as plan_bench
from kvxfer.bench.report import html, noise, results, runs_page
from kvxfer.bench.report import show as report
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.progress import Progress
from kvxfer.bench.scale import measure as scale_bench
from kvxfer.bench.serving import options as serving_options
from kvxfer.bench.serving import page as serving_page
from kvxfer.bench.serving import systems as serving_systems
from kvxfer.bench.serving.stages import Served
from kvxfer.bench.setup import measure as setup_bench
from kvxfer.bench.work.layout_names import NAMES
from kvxfer.bench.work.models import MODELS
from kvxfer.bench.work.trace import ARRIVALS, SAMPLES

_CHECK_FAILED = 1
_BASELINE_FAILED = 2
_INTERRUPTED = 130

app = typer.Typer(help="Measures page moves beside this machine's limits.", no_args_is_help=True)


class Format(enum.StrEnum):
    """How a result is shown."""

    TABLE = "table"
    JSON = "json"


class ReportFormat(enum.StrEnum):
    """How many results are shown."""

    HTML = "html"
    TABLE = "table"


def _one_of(names: tuple[str, ...]) -> str:
    return ", ".join(names)


_FormatOption = Annotated[Format, typer.Option("--format", help="A table, or one JSON object on one line.")]
_OutOption = Annotated[
    Path | None, typer.Option(help="Keeps the result, the machine and its noise in this directory.")
]
_CorruptOption = Annotated[bool, typer.Option("--corrupt", hidden=True, help="Flip a byte after arrival.")]
_SeedOption = Annotated[int, typer.Option(min=0, help="Of every random order.")]
_TimeoutOption = Annotated[float, typer.Option("--timeout-s", help="Deadline of one transfer.")]
_SrcLayoutOption = Annotated[
    str | None, typer.Option(help=f"How sources hold the cache, names with + between: {NAMES}.")
]
_DstLayoutOption = Annotated[str | None, typer.Option(help="How the destination holds it.")]
_TraceOption = Annotated[str, typer.Option(help=f"A file, or a sample: {_one_of(tuple(SAMPLES))}")]
_RequestsOption = Annotated[int, typer.Option(help="Taken from the start of the trace.")]
_ArrivalsOption = Annotated[
    str, typer.Option(help=f"{_one_of(ARRIVALS)}: as room comes, at random, as in the trace.")
]
_RateOption = Annotated[float, typer.Option(help="Requests a second, of --arrivals poisson.")]
_SpeedupOption = Annotated[float, typer.Option(help="How much faster than the trace, of --arrivals trace.")]
_TimelineOption = Annotated[
    Path | None, typer.Option("--html", help="Writes a page with a timeline of every request.")
]
_ShapeOption = Annotated[str, typer.Option(help=f"Of --src-layout: {_one_of(tuple(MODELS))}")]


@app.command()
def pages(
    transport: Annotated[str, typer.Option(help=_one_of(page_moves.TRANSPORTS))] = page_moves.TRANSPORTS[0],
    op: Annotated[str, typer.Option(help=_one_of(page_moves.OPERATIONS))] = "write",
    total_mib: Annotated[int, typer.Option(help="Bytes of one transfer.")] = 256,
    block_kib: Annotated[int, typer.Option(help="Bytes of one page; layouts have pages of their own.")] = 32,
    pattern: Annotated[str, typer.Option(help=_one_of(page_moves.PATTERNS))] = "random",
    memory: Annotated[str, typer.Option(help=_one_of(page_moves.MEMORY_KINDS))] = "pool",
    iterations: Annotated[int, typer.Option(help="Measured ones, after one warm-up.")] = 7,
    layers: Annotated[
        int | None,
        typer.Option(
            help="Pages of a block, each in a layer of its own: 1. Of layouts: as many of the model's as fit."
        ),
    ] = None,
    src_layout: _SrcLayoutOption = None,
    dst_layout: _DstLayoutOption = None,
    shape: _ShapeOption = "Llama-3.1-70B",
    seed: _SeedOption = 1,
    timeout_s: _TimeoutOption = 30.0,
    format: _FormatOption = Format.TABLE,
    out: _OutOption = None,
    corrupt: _CorruptOption = False,
) -> None:
    """Move pages of one size between two processes, interleaved with the machine's limit.

    With --src-layout and --dst-layout, move the cache of one rank between layouts that differ,
    interleaved with a plain copy of as many bytes.
    """
    if src_layout is not None or dst_layout is not None:
        options = layout_bench.LayoutPagesOptions(
            src_layout=src_layout or "",
            dst_layout=dst_layout or "",
            shape=shape,
            transport=transport,
            op=op,
            total_mib=total_mib,
            pattern=pattern,
            memory=memory,
            iterations=iterations,
            layers=0 if layers is None else layers,
            seed=seed,
            timeout_s=timeout_s,
            corrupt=corrupt,
        )
        _measure("pages", lambda progress: layout_bench.run(options, progress), format, out)
        return
    plain = pages_bench.PagesOptions(
        transport,
        op,
        total_mib,
        block_kib,
        pattern,
        memory,
        iterations,
        1 if layers is None else layers,
        seed,
        timeout_s,
        corrupt,
    )
    _measure("pages", lambda progress: pages_bench.run(plain, progress), format, out)


@app.command()
def handover(
    model: Annotated[str, typer.Option(help=_one_of(tuple(MODELS)))] = "Llama-3.1-8B",
    transport: Annotated[
        str, typer.Option(help=_one_of(handover_bench.TRANSPORTS))
    ] = handover_bench.TRANSPORTS[0],
    trace: _TraceOption = "mooncake",
    requests: _RequestsOption = 24,
    max_tokens: Annotated[int, typer.Option(help="Lengths are scaled so that the longest fits.")] = 2048,
    prefill_ms_per_layer: Annotated[float, typer.Option(help="Pace of prefill; 0: as fast as it can.")] = 5.0,
    mode: Annotated[
        str, typer.Option(help="push: layers go as they finish; pull: decode reads when prefill has ended.")
    ] = "push",
    concurrency: Annotated[int, typer.Option(help="Requests in hand at once.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; one rank's slice moves.")] = 1,
    arrivals: _ArrivalsOption = "closed",
    rate: _RateOption = 2.0,
    speedup: _SpeedupOption = 1.0,
    prefix_reuse: Annotated[
        bool,
        typer.Option("--prefix-reuse", help="Blocks that decode holds from earlier requests do not move."),
    ] = False,
    prefills: Annotated[int, typer.Option(help="Prefill processes; requests go to them in turn.")] = 1,
    decodes: Annotated[int, typer.Option(help="Decode processes, each with --concurrency.")] = 1,
    html_file: _TimelineOption = None,
    seed: _SeedOption = 1,
    timeout_s: _TimeoutOption = 30.0,
    format: _FormatOption = Format.TABLE,
    out: _OutOption = None,
    corrupt: _CorruptOption = False,
) -> None:
    """Hand the pages of real requests from a prefill process to a decode process."""
    options = handover_bench.HandoverOptions(
        model=model,
        transport=transport,
        trace=trace,
        requests=requests,
        max_tokens=max_tokens,
        prefill_ms_per_layer=prefill_ms_per_layer,
        mode=mode,
        concurrency=concurrency,
        tp=tp,
        seed=seed,
        timeout_s=timeout_s,
        arrivals=arrivals,
        rate=rate,
        speedup=speedup,
        prefix_reuse=prefix_reuse,
        prefills=prefills,
        decodes=decodes,
        corrupt=corrupt,
    )
    html.check(html_file)

    def run(progress: Callable[[Progress], None]) -> Message:
        seen: list[Handover] = []
        result = handover_bench.run(options, progress, seen)
        if html_file is not None:
            html.write(html_file, handover_page.page(result, seen))
        return result

    _measure("handover", run, format, out)


@app.command()
def latency(
    transport: Annotated[
        str, typer.Option(help=_one_of(latency_bench.TRANSPORTS))
    ] = latency_bench.TRANSPORTS[0],
    nbytes: Annotated[int, typer.Option(help="Bytes of one write.")] = 4096,
    wait: Annotated[
        str, typer.Option(help="poll: both ends poll; event: both sleep until asyncio wakes them.")
    ] = "poll",
    iterations: Annotated[int, typer.Option(help="Measured round trips, after a fifth of warm-up.")] = 2000,
    seed: _SeedOption = 1,
    timeout_s: _TimeoutOption = 30.0,
    format: _FormatOption = Format.TABLE,
    out: _OutOption = None,
    corrupt: _CorruptOption = False,
) -> None:
    """Write a page with a notification, seen at the far end: half of a round trip."""
    options = latency_bench.LatencyOptions(transport, nbytes, wait, iterations, seed, timeout_s, corrupt)
    _measure("latency", lambda progress: latency_bench.run(options, progress), format, out)


@app.command()
def compare(
    against: Annotated[str, typer.Option(help="Other software, with commas between.")] = "nixl,mooncake",
    work: Annotated[str, typer.Option(help=_one_of(tuple(compare_bench.FIGURES)))] = "pages",
    rounds: Annotated[int, typer.Option(help="In each, every system starts afresh, in rotated order.")] = 3,
    transport: Annotated[
        str, typer.Option(help=_one_of(compare_bench.TRANSPORTS))
    ] = compare_bench.TRANSPORTS[0],
    op: Annotated[str, typer.Option(help=f"pages: {_one_of(page_moves.OPERATIONS)}")] = "write",
    total_mib: Annotated[int, typer.Option(help="pages: bytes of one transfer.")] = 256,
    block_kib: Annotated[int, typer.Option(help="pages: bytes of one page.")] = 32,
    pattern: Annotated[str, typer.Option(help=f"pages: {_one_of(page_moves.PATTERNS)}")] = "random",
    memory: Annotated[
        str,
        typer.Option(help=f"pages: kvxfer's, {_one_of(page_moves.MEMORY_KINDS)}; foreign is NIXL's kind."),
    ] = "pool",
    nbytes: Annotated[int, typer.Option(help="latency: bytes of one write.")] = 4096,
    iterations: Annotated[
        int, typer.Option(help="Measured in a round after a warm-up; 0: 5, or 500 of latency, 1 of setup.")
    ] = 0,
    seed: _SeedOption = 1,
    timeout_s: _TimeoutOption = 30.0,
    format: _FormatOption = Format.TABLE,
    out: _OutOption = None,
    corrupt: _CorruptOption = False,
) -> None:
    """Do the same work with other software (`make baselines` installs it), round by round."""
    options = compare_bench.CompareOptions(
        against=tuple(name.strip() for name in against.split(",") if name.strip()),
        work=work,
        rounds=rounds,
        transport=transport,
        op=op,
        total_mib=total_mib,
        block_kib=block_kib,
        pattern=pattern,
        memory=memory,
        nbytes=nbytes,
        iterations=iterations,
        seed=seed,
        timeout_s=timeout_s,
        corrupt=corrupt,
    )
    result = _measure("compare", lambda progress: compare_bench.run(options, progress), format, out)
    if result["failures"]:
        raise typer.Exit(_BASELINE_FAILED)


@app.command()
def serving(
    systems: Annotated[
        str, typer.Option(help=f"With commas between, of {_one_of(serving_systems.NAMES)}.")
    ] = ",".join(serving_systems.NAMES),
    trace: _TraceOption = "mooncake",
    requests: _RequestsOption = 8,
    max_tokens: Annotated[
        int, typer.Option(help="Lengths are scaled so that the longest prompt fits.")
    ] = 1024,
    max_output_tokens: Annotated[int, typer.Option(help="Longer answers end there.")] = 16,
    rounds: Annotated[int, typer.Option(help="In each every system serves all, in rotated order.")] = 3,
    arrivals: _ArrivalsOption = "closed",
    concurrency: Annotated[int, typer.Option(help="Requests in hand at once, of --arrivals closed.")] = 2,
    rate: _RateOption = 0.5,
    speedup: _SpeedupOption = 1.0,
    html_file: _TimelineOption = None,
    seed: _SeedOption = 1,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", help="How long a server may say nothing.")
    ] = 60.0,
    format: _FormatOption = Format.TABLE,
    out: _OutOption = None,
) -> None:
    """Serve a trace with prefill and decode on real engines, with this connector and with others, in turns.

    Needs `make bench-serving-setup`. A minute for each engine pair to start, then the rounds.
    """
    options = serving_options.ServingOptions(
        systems=tuple(name.strip() for name in systems.split(",") if name.strip()),
        trace=trace,
        requests=requests,
        max_tokens=max_tokens,
        max_output_tokens=max_output_tokens,
        rounds=rounds,
        arrivals=arrivals,
        concurrency=concurrency,
        rate=rate,
        speedup=speedup,
        seed=seed,
        timeout_s=timeout_s,
    )
    options.read_requests()
    html.check(html_file)
    serving_systems.enter_environment()
    from kvxfer.bench.serving import measure as serving_bench  # needs what engines' environments have

    def run(progress: Callable[[Progress], None]) -> Message:
        seen: dict[str, list[Served]] = {}
        result = serving_bench.run(options, progress, seen)
        if html_file is not None:
            html.write(html_file, serving_page.page(result, seen))
        return result

    result = _measure("serving", run, format, out)
    if result["failures"]:
        raise typer.Exit(_BASELINE_FAILED)


@app.command("report")
def report_runs(
    first: Annotated[Path, typer.Argument(metavar="DIR", help="Where --out kept results.")],
    second: Annotated[
        Path | None, typer.Argument(metavar="[DIR2]", help="Another, judged against the first.")
    ] = None,
    format: Annotated[ReportFormat, typer.Option("--format", help="A page, or tables.")] = ReportFormat.HTML,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="The page; by default in the last directory.")
    ] = None,
) -> None:
    """Show many runs on one page, or say whether those of a second directory are faster."""
    found = [results.read(folder) for folder in (first, second) if folder is not None]
    if format is ReportFormat.TABLE:
        report.print_runs((first, second), found)
        return
    if second is None:
        document = runs_page.one(str(first), found[0])
    else:
        document = runs_page.two((str(first), str(second)), *found)
    last = second or first
    name = "report.html" if second is None else "comparison.html"
    path = html_file or (last if last.is_dir() else last.parent) / name
    html.write(path, document)
    for warning in (warning for one in found for warning in one.warnings):
        typer.echo(f"kvxfer: {warning}", err=True)
    typer.echo(path)


@app.command()
def plan(
    layers: Annotated[int, typer.Option(help="Of both caches.")] = 64,
    blocks: Annotated[int, typer.Option(help="Named by one transfer.")] = 512,
    iterations: Annotated[int, typer.Option(help="Of compiling, and of posting.")] = 50,
    src_layout: _SrcLayoutOption = None,
    dst_layout: _DstLayoutOption = None,
    shape: _ShapeOption = "Llama-3.1-70B",
    seed: _SeedOption = 1,
    format: _FormatOption = Format.TABLE,
    out: _OutOption = None,
) -> None:
    """Compile the copy program of two layouts, and post transfers with it.

    With --src-layout and --dst-layout, the program of one pair of ranks, and a request of as many blocks
    of the destination: one post for each source rank.
    """
    if src_layout is not None or dst_layout is not None:
        named = layout_plan_bench.LayoutPlanOptions(
            src_layout or "", dst_layout or "", shape, layers, blocks, iterations, seed
        )
        _measure("plan", lambda progress: layout_plan_bench.run(named, progress), format, out)
        return
    options = plan_bench.PlanOptions(layers, blocks, iterations, seed)
    _measure("plan", lambda progress: plan_bench.run(options, progress), format, out)


@app.command()
def setup(
    transport: Annotated[str, typer.Option(help=_one_of(setup_bench.TRANSPORTS))] = setup_bench.TRANSPORTS[0],
    iterations: Annotated[int, typer.Option(help="Two fresh processes each.")] = 5,
    idle_s: Annotated[float, typer.Option("--idle-s", help="How long they are watched doing nothing.")] = 2.0,
    format: _FormatOption = Format.TABLE,
    out: _OutOption = None,
) -> None:
    """Import, create and connect an agent, and let it idle."""
    options = setup_bench.SetupOptions(transport, iterations, idle_s)
    _measure("setup", lambda progress: setup_bench.run(options, progress), format, out)


@app.command()
def scale(
    series: Annotated[
        list[str] | None, typer.Option(help=f"{_one_of(tuple(scale_bench.SERIES))}; may be repeated. All.")
    ] = None,
    transport: Annotated[str, typer.Option(help=_one_of(scale_bench.TRANSPORTS))] = scale_bench.TRANSPORTS[0],
    at_most: Annotated[int, typer.Option(help="Of each series.")] = 10_000,
    total_mib: Annotated[int, typer.Option(help="That all prefills write together.")] = 64,
    repeats: Annotated[int, typer.Option(help="Of each step, in fresh processes; the median counts.")] = 3,
    seed: _SeedOption = 1,
    format: _FormatOption = Format.TABLE,
    out: _OutOption = None,
) -> None:
    """Measure what grows with transfers in flight, regions, peers, and prefills at once."""
    wanted = tuple(series or scale_bench.SERIES)
    options = scale_bench.ScaleOptions(wanted, transport, at_most, total_mib, repeats, seed)
    _measure("scale", lambda progress: scale_bench.run(options, progress), format, out)


def _measure(
    title: str, run: Callable[[Callable[[Progress], None]], Message], format: Format, out: Path | None
) -> Message:
    """Runs one benchmark under watch (its progress, the noise beside it), keeps and shows its result.

    Every command ends here, so that all of them take ``--out`` and say when the machine was busy.
    """
    if out is not None:
        results.check_directory(out)
    before = noise.Sample.take()
    with report.watching(title) as progress:
        result = run(progress)
    # A benchmark that ends servers of its own looks before it does.
    beside = result.pop("noise", None) or noise.between(before, noise.Sample.take())
    if out is not None:
        results.keep(out, result, beside)
    if format is Format.JSON:
        report.print_json(result)
    else:
        report.print_table(result, beside)
    if not result["verified"]:
        raise typer.Exit(_CHECK_FAILED)
    if result.get("interrupted"):
        raise typer.Exit(_INTERRUPTED)
    return result
