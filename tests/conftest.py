"""What all tests share."""

from __future__ import annotations

import ctypes.util
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import hypothesis.core
import pytest
from hypothesis import HealthCheck, settings

# Where pytest was not started as a module, the root is not on the path.
if (ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, ROOT)

from tests import seeds

# A failure prints the seed and the example; the database would only be a second source of truth.
# No example is too slow on a machine that has other things to do. Where the environment has CI,
# hypothesis would draw the same examples in each run.
settings.register_profile(
    "kvxfer",
    database=None,
    print_blob=True,
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvxfer")

# Whoever is started in the background by a shell without job control is to ignore Ctrl-C, and so is all
# that it starts. Tests of Ctrl-C need one that is heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Agents of tests attach to no daemon that this machine happens to have; a test that wants one names it.
os.environ.setdefault("KVXFER_DAEMON_DIR", "")
# Threads of numpy's wait busily at each start of a process; no test multiplies matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# It warns on the standard output, which tests read.
os.environ.setdefault("UCX_LOG_LEVEL", "error")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="draw all that is random as a run that printed this did")


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.option.seed = seeds.choose(config.option.seed)  # xdist hands options to its workers
    except ValueError as error:
        raise pytest.UsageError(f"--seed or {seeds.ENVIRONMENT}: {error}") from error


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Of one seed for all, parts of a million examples would be the same ones again and again.
    if getattr(item.config.option, "hypothesis_seed", None) is None:
        hypothesis.core.global_force_seed = seeds.seed_of(item.nodeid)  # type: ignore[assignment]


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (again: pytest --seed {config.option.seed})"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"replay with: pytest --seed {config.option.seed}", red=True)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's own, which follows from the run's and from the test's name."""
    return seeds.seed_of(request.node.nodeid)


# All that tests name; a build may have fewer (native/CMakeLists.txt has a line for each).
TRANSPORTS = {"cuda_ipc", "libfabric", "loopback", "shm", "tcp", "ucx", "unix"}


def named(value: object) -> set[str]:
    """Transports that a parameter of a test, or what stands in it, names."""
    value = getattr(getattr(value, "options", value), "transports", value)
    if isinstance(value, str):
        return {value.removesuffix("-written")} & TRANSPORTS
    return set().union(*map(named, value)) if isinstance(value, tuple) else set()


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Leaves out tests of transports that this build does not have."""
    try:
        from kvxfer.session.transport_registry import kinds
    except ImportError:  # without the native module all that needs it is left out
        return
    lacking = TRANSPORTS - set(kinds())
    # Libraries that are opened at run time.
    for transport, library in (("ucx", "ucp"), ("libfabric", "fabric")):
        if ctypes.util.find_library(library) is None:
            lacking.add(transport)
    for item in items if lacking else ():
        of_test = [mark.args for mark in item.iter_markers("transports")]
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if missing := lacking & named((*of_test, *parameters)):
            item.add_marker(pytest.mark.skip(reason=f"there is no {', '.join(sorted(missing))}"))
