"""Shows a run of `kvxfer bench serving`."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.bench.report import shown
from kvxfer.bench.report.document import Part, Table, Words, number, spread_in_words
from kvxfer.bench.run.channel import Message
from kvxfer.bench.serving.measure import COMPARED
from kvxfer.bench.serving.stages import SGLANG, VLLM, Course
from kvxfer.bench.serving.systems import OURS_OF
from kvxfer.bench.serving.systems import SGLANG as SGLANG_ENGINE


def parts(result: Message) -> Iterator[Part]:
    """Yields what every system did, stage by stage, and notes for the reader."""
    yield Words(_title(result), "bold")
    systems: Message = result["systems"]
    engine = result["engine"]
    course = SGLANG if engine == SGLANG_ENGINE else VLLM
    if systems:
        yield _latencies(systems, course)
        yield _costs(systems)
    known = {figure for of in result["ratios"].values() for figure in of}
    yield from shown.ratios(result, OURS_OF[engine], [figure for figure in COMPARED if figure in known])
    for name, meaning in {**course.stages, **course.own}.items():
        yield Words(f"  {_label(name)}: {meaning}", "dim")
    for name, system in systems.items():
        settings = ", ".join(f"{key}={value}" for key, value in system["settings"].items())
        yield Words(f"{name}: {system['words']}" + (f"; {settings}" if settings else ""))
        yield Words(f"  {_served(result['served'][name])}", "dim")
    yield Words(f"engines' logs: {result['logs']['folder']}", "dim")
    for name, words in result["failures"].items():
        yield Words(f"{name} was left out from then on: {words}", "bad")


def _label(name: str) -> str:
    return f"{name} (own)" if name in ("load", "move") else name.replace("_", " ")


def _title(result: Message) -> str:
    return (
        f"serving: {result['requests']} requests of {result['trace']}, {result['concurrency']} at a "
        f"time, {result['prompt_tokens']} prompt tokens and up to {result['max_output_tokens']} answer "
        f"tokens each, {result['rounds']} rounds; {result['engine']} on the CPU, model "
        f"{result['model']}; while one system is measured, the engines of the others are stopped"
    )


def _latencies(systems: Message, course: Course) -> Table:
    def row(label: str, *path: str) -> tuple[str, ...]:
        cells = []
        for system in systems.values():
            for name in path:
                system = (system or {}).get(name)
            known = (system or {}).values()
            cells.append(" ".join(number(value, 3) for value in known) or "-")
        return (label, *cells)

    rows = [row("first token", "first_token_ms"), row("between tokens", "between_tokens_ms"), ()]
    rows += [row(_label(stage), "stages_ms", stage) for stage in course.stages]
    rows.append(())
    rows += [row(_label(part), "own_ms", part) for part in course.own if part not in course.stages]
    return Table(("ms: p50 p90 p99", *systems), rows)


def _costs(systems: Message) -> Table:
    of = systems.values()
    rows: list[tuple[str, ...]] = []
    for role in ("prefill", "decode"):
        if not any(role in one["step_us"] for one in of):
            continue  # for backends that are not part of a step
        cells = (spread_in_words(one["step_us"].get(role)) for one in of)
        rows.append((f"connector, us a step of {role}", *cells))
    if rows:
        rows.append(())
    rows.append(("idle, cores", *(f"{one['idle_cores']:.3f}" for one in of)))
    return Table(("median (min to max) of rounds", *systems), rows)


def _served(served: Message) -> str:
    words = f"{served['requests']} requests, {served['handed_over']} handed over"
    if served["failed"]:
        words += f", {served['failed']} failed ({served['failure']})"
    return words
