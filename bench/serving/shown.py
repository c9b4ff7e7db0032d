"""What a run of `kvxfer bench serving` is shown as: tables, and the page with every request on a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvxfer.bench.report.document import Figure, Heading, Part, Table, Words, number, spread_in_words
from kvxfer.bench.run.channel import Message
from kvxfer.bench.serving.measure import COMPARED
from kvxfer.bench.serving.stages import OWN, STAGES, Served
from kvxfer.bench.serving.systems import OURS

# Rows of a timeline; further requests are in the distributions.
_MAX_ROWS = 60
_LABELS = {"load": "load (own)"}


def parts(result: Message) -> Iterator[Part]:
    """Yields what every system did, stage by stage, and what a reader has to know."""
    yield Words(_title(result), "bold")
    systems: Message = result["systems"]
    if systems:
        yield _latencies(systems)
        yield _costs(systems)
    if result["ratios"]:
        yield Words("how many times better kvxfer is: median (min to max) of the rounds; below 1 it is not")
        compared = result["ratios"].values()
        rows = [
            (name.replace("_", " "), *(spread_in_words(one.get(name)) for one in compared))
            for name in COMPARED
        ]
        yield Table((f"{OURS} beside", *result["ratios"]), rows)
    for name, meaning in {**STAGES, **OWN}.items():
        yield Words(f"  {_label(name)}: {meaning}", "dim")
    for name, system in systems.items():
        settings = ", ".join(f"{key}={value}" for key, value in system["settings"].items())
        yield Words(f"{name}: {system['words']}" + (f"; {settings}" if settings else ""))
        yield Words(f"  {_tokens(result['tokens'][name])}", "dim")
    yield Words(f"engines' logs: {result['logs']['folder']}", "dim")
    for name, words in result["failures"].items():
        yield Words(f"{name} was left out from there: {words}", "bad")


def page(result: Message, seen: Sequence[tuple[str, Sequence[Served]]]) -> Iterator[Part]:
    """Yields the parts of the page; of a run that was cut short what was seen before."""
    from kvxfer.bench.report.plots import Bar, bars

    yield from parts(result)
    yield Heading("time to first token, by stage")
    rows = []
    for name, system in result["systems"].items():
        stages = {stage: values["p50"] for stage, values in system.get("stages_ms", {}).items()}
        if not stages and "first_token_ms" in system:
            stages = {"prefill": system["first_token_ms"]["p50"]}
        rows.append(Bar(name, _one_behind_the_other(0.0, stages)))
    if rows:
        yield Figure(bars(rows, "ms"), "Medians of each stage, one after the other.")
    rows = [
        Bar(
            f"{name}: {len(one.answer.asked.prompt)} tokens",
            _one_behind_the_other(0.0, {key: ms for key, ms in one.stages_ms().items() if key != "prefill"}),
        )
        for name, those in seen
        for one in [one for one in those if one.was_handed_over][:_MAX_ROWS]
    ]
    if rows:
        yield Heading("handovers")
        words = "From the end of a request's prefill to its first token at the client."
        yield Figure(bars(rows, "ms after the end of prefill"), words)
    for name, those in seen:
        yield from _system(name, [one for one in those if one.answer.token_ns])


def _system(name: str, answered: Sequence[Served]) -> Iterator[Part]:
    from kvxfer.bench.report.plots import Bar, bars, distribution

    if not answered:
        return
    yield Heading(name)
    yield distribution([one.answer.first_token_ms for one in answered], "time to first token, ms")
    if gaps := [gap for one in answered for gap in one.answer.between_tokens_ms()]:
        yield distribution(gaps, "between tokens, ms")
    starts_ns: dict[int, int] = {}
    for one in answered:
        starts_ns[one.round] = min(one.answer.arrival_ns, starts_ns.get(one.round, one.answer.arrival_ns))
    rows = []
    for one in answered[:_MAX_ROWS]:
        start_ns = starts_ns[one.round]
        whole = {"prefill": one.answer.first_token_ms}
        stages = one.stages_ms() if one.was_handed_over else whole
        at_ms = (one.answer.arrival_ns - start_ns) / 1e6
        points = [((token_ns - start_ns) / 1e6, "token") for token_ns in one.answer.token_ns]
        label = f"{one.round + 1}: {len(one.answer.asked.prompt)} tokens"
        rows.append(Bar(label, _one_behind_the_other(at_ms, stages), points))
    plot = bars(rows, "ms after the round's first arrival")
    yield Figure(plot, "Each request on the clock of its round; points are tokens.")


def _one_behind_the_other(at: float, took: dict[str, float]) -> list[tuple[float, float, str]]:
    segments = []
    for stage, ms in took.items():
        segments.append((at, at + ms, _label(stage)))
        at += ms
    return segments


def _label(name: str) -> str:
    return _LABELS.get(name, name.replace("_", " "))


def _title(result: Message) -> str:
    arrivals = {
        "closed": f"{result['concurrency']} at a time",
        "poisson": f"{result['rate']:g} a second, at random",
        "trace": f"as in the trace, {result['speedup']:g} times as fast",
    }[result["arrivals"]]
    return (
        f"serving: {result['requests']} requests of {result['trace']}, {arrivals}, "
        f"{result['prompt_tokens']} prompt tokens and up to {result['max_output_tokens']} answered each, "
        f"{result['rounds']} rounds; vLLM on the CPU, model {result['model']}; while one system is measured "
        "the engines of the others are stopped"
    )


def _latencies(systems: Message) -> Table:
    def row(label: str, *path: str) -> tuple[str, ...]:
        cells = []
        for system in systems.values():
            for name in path:
                system = (system or {}).get(name)
            keys = ("p50",) if path[0] == "first" else ("p50", "p90", "p99")
            cells.append("-" if system is None else " ".join(number(system[key], 3) for key in keys))
        return (label, *cells)

    rows = [row("first token", "first_token_ms"), row("between tokens", "between_tokens_ms"), ()]
    rows += [row(_label(stage), "stages_ms", stage) for stage in STAGES]
    rows.append(())
    rows += [row(_label(part), "own_ms", part) for part in OWN if part not in STAGES]
    rows.append(())
    rows.append(row("first request of all: first token", "first", "first_token_ms"))
    rows.append(row("first request of all: load", "first", "own_ms", "load"))
    return Table(("ms: p50 p90 p99", *systems), rows)


def _costs(systems: Message) -> Table:
    of = systems.values()
    rows: list[tuple[str, ...]] = [
        (label, *(spread_in_words(one.get(figure)) for one in of))
        for figure, label in (
            ("output_tokens_per_s", "answered tokens/s"),
            ("prompt_tokens_per_s", "prompt tokens/s"),
            ("processor_s", "processor s of the engines"),
        )
    ]
    for role in ("prefill", "decode"):
        cells = (spread_in_words(one.get("step_us", {}).get(role)) for one in of)
        rows.append((f"connector, us a step of {role}", *cells))
    rows.append(())
    rows.append(("idle, cores", *(f"{one['idle']['cores']:.3f}" for one in of)))
    busiest = (f"{one['idle']['busiest_thread_cores']:.3f} {one['idle']['busiest_thread']}" for one in of)
    rows.append(("idle, its busiest thread", *busiest))
    return Table(("median (min to max) of rounds", *systems), rows)


def _tokens(tokens: Message) -> str:
    words = f"{tokens['requests']} requests, {tokens['handed_over']} handed over"
    if tokens["failed"]:
        words += f", {tokens['failed']} failed ({tokens['failure']})"
    if tokens["compared"]:
        words += f"; {tokens['equal']} of {tokens['compared']} answers have the tokens of one engine"
    return words
