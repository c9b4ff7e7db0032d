"""``kvxfer bench compare``: the same work by kvxfer and by other software, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import kvxfer
from kvxfer.bench.compare import rounds
from kvxfer.bench.compare import work as baseline_work
from kvxfer.bench.compare.baseline import SOFTWARE, Baseline, chosen_baselines, known_baselines
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.latency import measure as latency_bench
from kvxfer.bench.latency.measure import LatencyOptions, Nbytes
from kvxfer.bench.pages import measure as pages_bench
from kvxfer.bench.pages.measure import BlockKib, MemoryKind, Op, PagesOptions, Total
from kvxfer.bench.report import machine, shown
from kvxfer.bench.report.document import Part, Table, Words, spread_in_words
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.counters import Counters
from kvxfer.bench.run.course import Progress, Say
from kvxfer.bench.run.options import Option, Seed, Timeout, check, described
from kvxfer.bench.run.stats import spread
from kvxfer.bench.setup import measure as setup_bench
from kvxfer.bench.setup.measure import SetupOptions
from kvxfer.errors import KvxferError

#: kvxfer's name among the systems.
OURS = "kvxfer"

#: work -> figure -> whether more of it is better. The first figure is the one to quote.
FIGURES: Mapping[str, Mapping[str, bool]] = {
    "pages": {"gb_per_s": True, "total_ms": False, "post_ms": False, "cpu_s_per_gib": False},
    "latency": {"p50_us": False, "p99_us": False},
    # Some systems shake hands when they connect, others with the first write. The sum is fair to both.
    "setup": dict.fromkeys(
        (
            *("import_ms", "create_ms", "register_ms"),
            *("connect_ms", "first_write_ms", "connect_and_write_ms"),
            *("idle_cpu_cores", "rss_mib", "threads"),
        ),
        False,
    ),
}
# An idle process uses a few microseconds of processor time a second. Less than this counts as equal.
_FLOORS = {"idle_cpu_cores": 0.001}
#: What is counted for each page or write, at both ends together.
_COSTS = {
    "processor_us": "processor time, us",
    "switches": "context switches",
    "cycles": "cycles",
    "instructions": "instructions",
}
_ITERATIONS = {"pages": 5, "latency": 500, "setup": 1}
_OURS: Mapping[str, Callable[..., Message]] = {
    "pages": pages_bench.run,
    "latency": latency_bench.run,
    "setup": setup_bench.run,
}
_THEIRS: Mapping[str, Callable[..., Message]] = {
    "pages": baseline_work.run_pages,
    "latency": baseline_work.run_latency,
    "setup": baseline_work.run_setup,
}


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Do the same work with kvxfer and other software, in rounds; `make baselines` installs the others.

    Each system starts, warms up, works and ends before the next one starts, because some idle agents use a
    core.

    kvxfer bench compare --work latency --against nixl --transport tcp
    """

    against: Annotated[
        tuple[str, ...], Option(f"Other software: {', '.join(SOFTWARE)}.", one_of=SOFTWARE, value="SOFTWARE")
    ] = SOFTWARE
    work: Annotated[str, Option("What the systems do.", one_of=tuple(FIGURES))] = "pages"
    rounds: Annotated[
        int,
        Option(
            "Number of rounds. In each round, every system starts new processes, in rotated order.",
            at_least=1,
        ),
    ] = 3
    transport: Annotated[
        str,
        Option(
            "shm or tcp; or ucx or libfabric for kvxfer, compared with the others' tcp.",
            one_of=("shm", "tcp", "ucx", "libfabric"),
        ),
    ] = "shm"
    op: Op = "write"
    total_mib: Total = 256
    block_kib: BlockKib = 32
    #: For kvxfer alone. The other systems use memory of their own process, which is ``foreign``.
    memory: MemoryKind = "pool"
    nbytes: Nbytes = 4096
    iterations: Annotated[
        int,
        Option(
            "Iterations measured in a round, after a warm-up. 0: 5, or 500 for latency, 1 for setup.",
            at_least=0,
        ),
    ] = 0
    seed: Seed = 1
    timeout_s: Timeout = 30.0

    def __post_init__(self) -> None:
        check(self)
        self.of_work()

    @property
    def num_iterations(self) -> int:
        """How many iterations of a system are measured in a round."""
        return self.iterations or _ITERATIONS[self.work]

    @property
    def num_moves(self) -> int:
        """How many pages or writes a system's measured iterations are; 0 where none are counted."""
        work = self.of_work()
        if isinstance(work, PagesOptions):
            return self.num_iterations * work.num_pages
        return 2 * self.num_iterations if isinstance(work, LatencyOptions) else 0

    @property
    def our_memory(self) -> str:
        """The kind of memory whose pages kvxfer moves."""
        return {"pages": self.memory, "latency": "pool", "setup": "foreign"}[self.work]

    def of_work(self) -> PagesOptions | LatencyOptions | SetupOptions:
        """The options of the benchmark that defines this work; raises for options that do not fit."""
        if self.work == "setup":
            return SetupOptions(self.transport, self.num_iterations)
        common: Message = {name: getattr(self, name) for name in ("transport", "seed", "timeout_s")}
        common["iterations"] = self.num_iterations
        if self.work == "latency":
            return LatencyOptions(nbytes=self.nbytes, **common)  # both ends poll
        names = ("op", "total_mib", "block_kib", "memory")
        return PagesOptions(**common, **{name: getattr(self, name) for name in names})


def run(options: CompareOptions, progress: Say, known: tuple[Baseline, ...] | None = None) -> Message:
    """Runs it and returns one JSON object. If it ends early, that has what was measured until then.

    ``verified`` is false when a check failed, which ends the run. A system that crashes or hangs is
    left out from then on and named in ``failures``.
    ``known``: the baselines to choose from; by default those of ``make baselines``.
    """
    baselines = chosen_baselines(options.against, known_baselines() if known is None else known)
    comparison = _Comparison(options, baselines, progress)
    failure = ""
    try:
        comparison.run()
    except CheckFailedError as error:
        failure = str(error)
    result: Message = {
        "bench": "compare",
        **described(options),
        "iterations": options.num_iterations,
        "systems": comparison.systems(),
        "ratios": rounds.ratios(OURS, FIGURES[options.work], comparison.rounds, _FLOORS),
        "rounds_measured": comparison.rounds,
        "not_counted": comparison.not_counted,
        "machine": machine.describe(),
        "date": datetime.now(UTC).date().isoformat(),
        "notes": [note for baseline in baselines for note in baseline.notes],
        "failures": comparison.failures,
        "verified": not failure,
    }
    return {**result, "failure": failure} if failure else result


class _Comparison:
    """The rounds of one run. Keeps their figures when the run is cut short."""

    def __init__(self, options: CompareOptions, baselines: tuple[Baseline, ...], progress: Say) -> None:
        self._options = options
        self._baselines = {baseline.name: baseline for baseline in baselines}
        self._progress = progress
        self._identity: dict[str, Message] = {}
        #: In order: system -> figure -> value.
        self.rounds: list[dict[str, dict[str, float]]] = []
        #: System -> why it was left out.
        self.failures: dict[str, str] = {}
        #: Figure -> why it was not counted.
        self.not_counted: dict[str, str] = {}

    def run(self) -> None:
        """Runs all rounds, or stops when kvxfer itself fails."""
        names = [OURS, *self._baselines]
        total = self._options.rounds * len(names)
        for index in range(self._options.rounds):
            self.rounds.append({})
            for turn, name in enumerate(rounds.rotated(names, index)):
                if name in self.failures:
                    continue
                done = index * len(names) + turn
                self._progress(Progress(done, total, f"round {index + 1}: {name}"))
                try:
                    measured = self._ours() if name == OURS else self._theirs(self._baselines[name])
                except CheckFailedError:
                    raise
                except (BenchError, KvxferError) as error:
                    self.failures[name] = str(error)
                    self._progress(Progress(done, total, f"{name} failed and is left out: {error}"))
                    if name == OURS:
                        return
                else:
                    self._keep(name, measured)
        self._progress(Progress(total, total, "done"))

    def systems(self) -> dict[str, Message]:
        """Returns what each system is, and its figures over the rounds."""
        found = {}
        for name, identity in self._identity.items():
            values = [one[name] for one in self.rounds if name in one]
            figures = {figure: spread(value[figure] for value in values) for figure in values[0]}
            found[name] = {**identity, **figures}
        return found

    def _ours(self) -> Message:
        options = self._options
        counters = Counters()
        measured = _OURS[options.work](options.of_work(), _no_progress, *self._counting(counters))
        if not measured["verified"]:
            raise CheckFailedError(f"{OURS}: {measured['failure']}")
        settings = {name: measured[name] for name in ("copy_kernel", "page_kind") if name in measured}
        path = f"{options.transport}, {options.our_memory} memory"
        identity = {"version": kvxfer.__version__, "settings": settings, "path": path}
        return {**measured, **identity, "costs": self._costs(counters)}

    def _theirs(self, baseline: Baseline) -> Message:
        options = self._options
        counters = Counters()
        measured = _THEIRS[options.work](baseline, options.of_work(), *self._counting(counters))
        return {**measured, "path": baseline.paths[options.transport], "costs": self._costs(counters)}

    def _counting(self, counters: Counters) -> tuple[Counters, ...]:
        return (counters,) if self._options.num_moves else ()

    def _costs(self, counters: Counters) -> Message:
        """Returns what one page or write took, as far as it was counted."""
        if not self._options.num_moves:
            return {}
        self.not_counted |= counters.not_counted
        return counters.figures(self._options.num_moves)

    def _keep(self, name: str, measured: Message) -> None:
        self._identity[name] = {key: measured[key] for key in ("version", "path", "settings")}
        if self._options.work == "setup":
            parts = (_value(measured[figure]) for figure in ("connect_ms", "first_write_ms"))
            measured = {**measured, "connect_and_write_ms": sum(parts)}
        figures = {figure: _value(measured[figure]) for figure in FIGURES[self._options.work]}
        if "limit_ratio" in measured:
            figures["limit_ratio"] = measured["limit_ratio"]
        figures |= measured["costs"]
        self.rounds[-1][name] = figures


def _no_progress(at: Progress) -> None:
    """Drops the progress reports of a round, because the comparison has its own."""


def _value(figure: float | Message) -> float:
    """Returns a figure of one round; for a spread, its median."""
    return float(figure["median"] if isinstance(figure, dict) else figure)


def parts(result: Message) -> Iterator[Part]:
    """Yields the systems, how many times better kvxfer is, and notes for the reader."""
    yield Words(_title(result), "bold")
    figures = FIGURES[result["work"]]
    systems = result["systems"]
    if systems:
        rows = [
            (figure.replace("_", " "), *(spread_in_words(system[figure]) for system in systems.values()))
            for figure in figures
        ]
        # One row for each figure, because there are more figures than systems.
        yield Table(("median (min to max)", *systems), rows)
    yield from shown.ratios(result, OURS, figures)
    yield from _shown_costs(result)
    for name, system in systems.items():
        settings = ", ".join(f"{key}={value}" for key, value in system["settings"].items())
        words = f"{name} {system['version']}: {system['path']}"
        yield Words(f"{words}; {settings}" if settings else words)
    yield Words(f"{result['date']}: {machine.in_words(result['machine'])}")
    yield from (Words(note, "dim") for note in result["notes"])
    for name, words in result["failures"].items():
        yield Words(f"{name} failed and was left out from then on: {words}", "bad")
    if result["verified"] and systems and result["work"] == "pages":
        # `latency` checks every fiftieth write; `setup` checks the first one.
        yield Words("every byte checked at its destination, for every system and round")


def _shown_costs(result: Message) -> Iterator[Part]:
    """Yields what moved the figures: what each page or write took of the processors, by system."""
    systems, one = result["systems"], {"pages": "page", "latency": "write"}.get(result["work"])
    rows = [
        (words, *(spread_in_words(system.get(figure)) for system in systems.values()))
        for figure, words in _COSTS.items()
        if any(figure in system for system in systems.values())
    ]
    if rows:
        polling = ", polling included" if one == "write" else ""
        yield Table((f"for each {one}, both ends{polling}", *systems), rows)
    for figure, why in result["not_counted"].items():
        yield Words(f"{figure.replace('_', ' ')}: not counted: {why}", "dim")


def _title(result: Message) -> str:
    what = {
        "pages": f"{result['op']} of {result['total_mib']} MiB in pages of {result['block_kib']} KiB",
        "latency": f"a write of {result['nbytes']} bytes with a notification, both ends poll",
        "setup": "two new processes, one agent in each",
    }[result["work"]]
    rounds = f"{len(result['rounds_measured'])} of {result['rounds']} rounds of {result['iterations']}"
    return f"{what}, over {result['transport']}; {rounds}, interleaved"
