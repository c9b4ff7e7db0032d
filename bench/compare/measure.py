"""``kvxfer bench compare``: the same work by kvxfer and by other software, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import kvxfer
from kvxfer.bench.compare import work as baseline_work
from kvxfer.bench.compare.baseline import Baseline, chosen_baselines, known_baselines
from kvxfer.bench.errors import BenchError, CheckFailedError
from kvxfer.bench.latency import measure as latency_bench
from kvxfer.bench.latency.measure import LatencyOptions
from kvxfer.bench.pages import measure as pages_bench
from kvxfer.bench.pages.measure import PagesOptions
from kvxfer.bench.run.channel import Message
from kvxfer.bench.run.option_checks import check_counts, check_known
from kvxfer.bench.run.process import check_timeout
from kvxfer.bench.run.progress import Progress
from kvxfer.bench.run.stats import spread
from kvxfer.bench.setup import measure as setup_bench
from kvxfer.bench.setup.measure import SetupOptions
from kvxfer.errors import KvxferError

TRANSPORTS = ("shm", "tcp")
#: What kvxfer is called among the systems.
OURS = "kvxfer"

#: work -> figure -> whether more of it is better. The first figure is the one to quote.
FIGURES: Mapping[str, Mapping[str, bool]] = {
    "pages": {"gb_per_s": True, "total_ms": False, "post_ms": False, "cpu_s_per_gib": False},
    "latency": {"p50_us": False, "p99_us": False},
    # Some shake hands when they connect, some with the first write: the sum is fair to both.
    "setup": dict.fromkeys(
        (
            *("import_ms", "create_ms", "register_ms"),
            *("connect_ms", "first_write_ms", "connect_and_write_ms"),
            *("idle_cpu_cores", "rss_mib", "threads"),
        ),
        False,
    ),
}
# An idle process's clock shows a few microseconds a second: less than this is not told apart.
_FLOORS = {"idle_cpu_cores": 0.001}
_ITERATIONS = {"pages": 5, "latency": 500, "setup": 1}


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared. In a round every system starts afresh, warms up, works and ends.

    Systems never live at the same time: an idle agent of some takes a core.
    """

    against: tuple[str, ...] = ("nixl", "mooncake")
    work: str = "pages"
    rounds: int = 3
    transport: str = "shm"
    #: Of `pages`.
    op: str = "write"
    total_mib: int = 256
    block_kib: int = 32
    pattern: str = "random"
    #: Of kvxfer's side alone; the others have memory of their process, which is ``foreign``.
    memory: str = "pool"
    #: Of `latency`.
    nbytes: int = 4096
    #: Measured ones in a round; 0: as suits the work.
    iterations: int = 0
    seed: int = 1
    timeout_s: float = 30.0
    #: Flips a byte after each arrival, so that the check must fail.
    corrupt: bool = False

    def __post_init__(self) -> None:
        check_known(self, work=tuple(FIGURES), transport=TRANSPORTS)
        if not self.against:
            raise BenchError("--against names nothing; give one or more, with commas between")
        check_counts(self, "rounds")
        check_counts(self, "iterations", at_least=0)
        check_timeout(self.timeout_s)
        # They refuse what does not fit.
        if self.work == "pages":
            self.pages_options()
        elif self.work == "latency":
            self.latency_options()

    @property
    def num_iterations(self) -> int:
        """Measured iterations of a system in a round."""
        return self.iterations or _ITERATIONS[self.work]

    @property
    def our_memory(self) -> str:
        """What kind of memory kvxfer moves pages of."""
        return {"pages": self.memory, "latency": "pool", "setup": "foreign"}[self.work]

    def pages_options(self) -> PagesOptions:
        """The work `pages`."""
        return PagesOptions(
            self.transport,
            self.op,
            self.total_mib,
            self.block_kib,
            self.pattern,
            self.memory,
            self.num_iterations,
            seed=self.seed,
            timeout_s=self.timeout_s,
            corrupt=self.corrupt,
        )

    def latency_options(self) -> LatencyOptions:
        """The work `latency`; both ends poll."""
        return LatencyOptions(
            self.transport, self.nbytes, "poll", self.num_iterations, self.seed, self.timeout_s, self.corrupt
        )

    def setup_options(self) -> SetupOptions:
        """The work `setup`; an iteration is two fresh processes."""
        return SetupOptions(self.transport, self.num_iterations)


def run(
    options: CompareOptions,
    progress: Callable[[Progress], None],
    known: tuple[Baseline, ...] | None = None,
) -> Message:
    """Runs it and returns one JSON object, with what was measured when it ended early.

    ``verified`` is false when a check failed, which ends the run. A system that crashes or hangs is
    left out from there and named in ``failures``; Ctrl-C sets ``interrupted``.

    Parameters
    ----------
    known
        The baselines to choose from, if not those of ``make baselines``.
    """
    baselines = chosen_baselines(options.against, known_baselines() if known is None else known)
    comparison = _Comparison(options, baselines, progress)
    failure = ""
    interrupted = False
    try:
        comparison.run()
    except CheckFailedError as error:
        failure = str(error)
    except KeyboardInterrupt:
        interrupted = True
    described: Message = asdict(options)
    described.pop("corrupt")
    result: Message = {
        "bench": "compare",
        **described,
        "against": list(options.against),
        "iterations": options.num_iterations,
        "systems": comparison.systems(),
        "ratios": ratios(options.work, comparison.rounds),
        "rounds_measured": comparison.rounds,
        "notes": _notes(options, baselines),
        "failures": comparison.failures,
        "interrupted": interrupted,
        "verified": not failure,
    }
    return {**result, "failure": failure} if failure else result


class _Comparison:
    """The rounds of one run; what they gave stays here when one is cut short."""

    def __init__(
        self, options: CompareOptions, baselines: tuple[Baseline, ...], progress: Callable[[Progress], None]
    ) -> None:
        self._options = options
        self._baselines = {baseline.name: baseline for baseline in baselines}
        self._progress = progress
        self._identity: dict[str, Message] = {}
        #: In order: system -> figure -> value.
        self.rounds: list[dict[str, dict[str, float]]] = []
        #: System -> why it was left out.
        self.failures: dict[str, str] = {}

    def run(self) -> None:
        """Runs all rounds, or those until kvxfer itself fails."""
        names = [OURS, *self._baselines]
        total = self._options.rounds * len(names)
        for index in range(self._options.rounds):
            self.rounds.append({})
            for turn, name in enumerate(rotated(names, index)):
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
        if options.work == "pages":
            measured = pages_bench.run(options.pages_options(), _no_progress)
        elif options.work == "latency":
            measured = latency_bench.run(options.latency_options(), _no_progress)
        else:
            measured = setup_bench.run(options.setup_options(), _no_progress)
        if not measured["verified"]:
            raise CheckFailedError(f"{OURS}: {measured['failure']}")
        if measured.get("interrupted"):
            raise KeyboardInterrupt  # a round is whole, or it does not count
        settings = {name: measured[name] for name in ("copy_kernel", "page_kind") if name in measured}
        path = f"{options.transport}, {options.our_memory} memory"
        return {**measured, "version": kvxfer.__version__, "settings": settings, "path": path}

    def _theirs(self, baseline: Baseline) -> Message:
        options = self._options
        if options.work == "pages":
            measured = baseline_work.run_pages(baseline, options.pages_options())
        elif options.work == "latency":
            measured = baseline_work.run_latency(baseline, options.latency_options())
        else:
            measured = baseline_work.run_setup(baseline, options.setup_options(), options.corrupt)
        return {**measured, "path": baseline.paths[options.transport]}

    def _keep(self, name: str, measured: Message) -> None:
        self._identity[name] = {key: measured[key] for key in ("version", "path", "settings")}
        if self._options.work == "setup":
            parts = (_value(measured[figure]) for figure in ("connect_ms", "first_write_ms"))
            measured = {**measured, "connect_and_write_ms": sum(parts)}
        figures = {figure: _value(measured[figure]) for figure in FIGURES[self._options.work]}
        if "limit_ratio" in measured:
            figures["limit_ratio"] = measured["limit_ratio"]
        self.rounds[-1][name] = figures


def rotated(names: list[str], index: int) -> list[str]:
    """Returns the order of a round: each begins with the one after, so that none is always first."""
    start = index % len(names)
    return names[start:] + names[:start]


def ratios(work: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, Message]]:
    """Returns how many times better kvxfer is, by system and figure: each round's, and their spread.

    Our rate over theirs, or their time over ours: below 1 the other is better. A round counts where
    both were measured; where ours is 0 there is no ratio.
    """
    found: dict[str, dict[str, Message]] = {}
    for figure, more_is_better in FIGURES[work].items():
        floor = _FLOORS.get(figure, 0.0)
        by_system: dict[str, list[float]] = {}
        for measured in rounds:
            if OURS not in measured:
                continue
            mine = max(floor, measured[OURS][figure])
            for name, figures in measured.items():
                theirs = max(floor, figures[figure])
                above, below = (mine, theirs) if more_is_better else (theirs, mine)
                if name != OURS and below > 0:
                    by_system.setdefault(name, []).append(above / below)
        for name, values in by_system.items():
            by_round = [round(value, 3) for value in values]
            found.setdefault(name, {})[figure] = {**spread(values), "rounds": by_round}
    return found


def _no_progress(at: Progress) -> None:
    """Drops a round's own progress: the comparison has its own."""


def _value(figure: float | Message) -> float:
    """Returns a figure of one round; of a spread, its median."""
    return float(figure["median"] if isinstance(figure, dict) else figure)


def _notes(options: CompareOptions, baselines: tuple[Baseline, ...]) -> list[str]:
    software = {baseline.software for baseline in baselines}
    notes = [note for baseline in baselines for note in baseline.notes]
    if options.transport == "shm" and "nixl" in software:
        if options.our_memory == "foreign":
            words = "as kvxfer's path for foreign memory is: the two are alike"
        else:
            words = "not shared memory as kvxfer's pool is: it has no path of that kind"
            words += "; --memory foreign is of its kind" if options.work == "pages" else ""
        notes.append(f"nixl over shm is UCX cross-memory attach, {words}")
    if options.transport == "shm" and "mooncake" in software:
        notes.append("mooncake's non-CUDA wheel has no same-host path: its bytes go over loopback TCP")
    if options.work == "latency" and "nixl" in software:
        notes.append("nixl reposts one prepared transfer; kvxfer makes each write anew")
    return notes
