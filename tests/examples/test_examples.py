"""Each example has a page, runs as a reader runs it, and prints what its page says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

from tests.fault.cable import Cable, Host, why_not

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"
TUTORIALS: Final = ROOT / "docs" / "tutorials"
# A program that takes longer hangs; a machine may stall for seconds.
BOUND_S: Final = 120.0


@dataclass(frozen=True)
class Example:
    """A program that is one file.

    Attributes
    ----------
    name
        Its path in ``examples``.
    page
        The document that explains it, in ``docs``.
    lines
        What it prints: a pattern for each line, in any order, since processes print side by side.
    dies The same lines for each argument of ``--dies``. needs
        Packages without which it is not run.
    """

    name: str
    page: str
    lines: tuple[str, ...]
    dies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


RUN: Final = (
    Example(
        "pull.py",
        "tutorials/pull.md",
        (
            "prefill: decode has the pages; the blocks are free",
            "decode: 3 blocks came by (shm|tcp|unix), every byte right",
        ),
        {
            "prefill": (r"decode: computes the prompt itself: .* \[unreachable, .*\]",),
            "decode": ("prefill: decode did not read in time; the blocks are free",),
        },
    ),
    Example(
        "push.py",
        "tutorials/push.md",
        (
            "prefill: decode has 3 blocks; they are free here",
            "decode: 4 layers of 3 blocks, every byte right",
        ),
        {
            "prefill": (
                r"decode: computes the prompt itself, [0-2] layers came: .* \[peer-(lost|silent).*\]",
            ),
            "decode": (r"prefill: the request is lost, its blocks are free: .* \[(unreachable|peer-).*\]",),
        },
    ),
    Example(
        "unequal_tp.py",
        "tutorials/unequal-tp.md",
        (r"decode: 150 tokens of 8 heads from 2 ranks, in (float16|torch\.bfloat16), every element right",),
    ),
    Example(
        "inside_asyncio.py",
        "tutorials/inside-asyncio.md",
        (
            "prefill: 12 requests were fetched, 64 blocks are free",
            "decode: 12 requests came, every byte right",
        ),
    ),
    Example(
        "engine_loop.py",
        "tutorials/engine-loop.md",
        ("decode: 10 requests ran to their last token, every byte right",),
    ),
    Example(
        "park_pages.py",
        "tutorials/park-pages.md",
        (
            "prefill: parked, parked, parked - and it ends",
            "decode: 3 of 3 pages came, every byte right",
        ),
        needs=("fastapi", "httpx", "uvicorn"),
    ),
    Example(
        "lmdeploy_backend.py",
        "tutorials/own-connector.md",
        ("decode: 1024 bytes came, and no byte more",),
    ),
)
GPU_PAIR: Final = Example(
    "gpu_pair.py",
    "tutorials/gpu-pair.md",
    (
        "prefill: decode has 3 blocks; they are free here",
        "decode: 3 blocks came by (cuda_ipc|tcp|unix), every element right",
    ),
    needs=("torch",),
)
# Other examples are run by tests below, and hand_over.c by tests/control/test_handed_memory.py.
OTHERS: Final = {
    "hand_over.c": "pages.md",
    "two_hosts/prefill.py": "tutorials/two-hosts.md",
    "two_hosts/decode.py": "tutorials/two-hosts.md",
    "two_hosts/make_certificates.sh": "tutorials/two-hosts.md",
    "own_transport/CMakeLists.txt": "tutorials/own-transport.md",
    "own_transport/into_kvxfer.cmake": "tutorials/own-transport.md",
    "own_transport/procmem/procmem_transport.cpp": "tutorials/own-transport.md",
    "own_transport/test_procmem.cpp": "tutorials/own-transport.md",
}
PAGES: Final = {**{example.name: example.page for example in (*RUN, GPU_PAIR)}, **OTHERS}


def environment(**changes: str) -> dict[str, str]:
    """Returns this environment without kvxfer's settings, so that no daemon of this machine is used. Without
    buffers, two processes that print at once would mix their lines.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVXFER_") and name != "PYTHONUNBUFFERED"
    }
    return {**kept, "KVXFER_DAEMON_DIR": "", **changes}


@contextmanager
def started(
    *command: str | Path, folder: Path, stdin: int | None = None, **changes: str
) -> Iterator[subprocess.Popen[str]]:
    """Runs a program in its own process group, and kills the group afterwards."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**changes),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def require_run(example: Example, folder: Path, lines: tuple[str, ...], *arguments: str) -> None:
    """Runs an example in an empty folder: it ends with 0, prints only these lines, and leaves no files."""
    for package in example.needs:
        pytest.importorskip(package)
    with started(sys.executable, EXAMPLES / example.name, *arguments, folder=folder) as process:
        printed, errors = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, printed + errors
    left = printed.splitlines()
    for pattern in lines:
        matching = [line for line in left if re.fullmatch(pattern, line)]
        assert matching, f"no line {pattern!r} in: {printed}{errors}"
        left.remove(matching[0])
    assert not left
    assert not list(folder.iterdir())


@pytest.mark.parametrize("example", RUN, ids=[example.name for example in RUN])
def test_an_example_runs_and_prints_what_its_page_says(example: Example, tmp_path: Path) -> None:
    require_run(example, tmp_path, example.lines)


@pytest.mark.parametrize(
    ("example", "dies"),
    [pytest.param(example, dies, id=f"{example.name}-{dies}") for example in RUN for dies in example.dies],
)
def test_the_process_that_is_left_ends_by_itself(example: Example, dies: str, tmp_path: Path) -> None:
    require_run(example, tmp_path, example.dies[dies], "--dies", dies)


def test_unequal_ranks_of_torch_tensors(tmp_path: Path) -> None:
    """Runs if torch is installed: ``.vllm/bin/python -m pytest tests/examples``."""
    pytest.importorskip("torch")
    (example,) = (example for example in RUN if example.name == "unequal_tp.py")
    require_run(example, tmp_path, tuple(line.replace("float16|", "") for line in example.lines))


@pytest.mark.gpu
def test_a_pair_of_gpu_caches(tmp_path: Path) -> None:
    from kvxfer.gpu.availability import availability

    if reason := availability().reason:
        pytest.skip(reason)
    require_run(GPU_PAIR, tmp_path, GPU_PAIR.lines)


# ---- two hosts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A host on which one half of the hand-over runs; None: this host, over loopback."""

    host: Host | None

    @property
    def address(self) -> str:
        return self.host.ipv4 if self.host else "127.0.0.1"

    def command(self, line: str, **variables: str) -> list[str]:
        """Returns the shell's command line that runs on that host."""
        within = ("nsenter", "-t", str(self.host.pid), "-n", "-m") if self.host else ()
        settings = [f"{name}={value}" for name, value in variables.items()]
        return [*within, "env", *settings, "sh", "-c", f"exec {line}"]


@pytest.fixture(scope="module")
def places() -> Iterator[tuple[Place, Place]]:
    if why_not():
        yield Place(None), Place(None)
        return
    with Cable() as cable:
        yield Place(cable.here), Place(cable.there)


def with_secret(
    folder: Path, engine: str, secret: str = "a secret for tests alone, and of some length"
) -> dict[str, str]:
    file = folder / f"{engine}.secret"
    file.write_text(secret)
    file.chmod(0o600)
    return {"KVXFER_SECRET_FILE": str(file)}


def with_certificates(folder: Path, engine: str) -> dict[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    if not (folder / "authority.pem").exists():
        script = EXAMPLES / "two_hosts" / "make_certificates.sh"
        subprocess.run(["sh", script, folder], check=True, capture_output=True, timeout=BOUND_S)
    return {
        "KVXFER_TLS_CERTIFICATE": str(folder / f"{engine}.pem"),
        "KVXFER_TLS_KEY": str(folder / f"{engine}.key"),
        "KVXFER_TLS_AUTHORITIES": str(folder / "authority.pem"),
    }


def half(name: str) -> str:
    return shlex.join([sys.executable, str(EXAMPLES / "two_hosts" / f"{name}.py")])


@pytest.mark.parametrize(
    ("known", "proof"),
    [(with_secret, "the secret"), (with_certificates, "the certificate of acme/prefill/prefill-0")],
    ids=["secret", "certificates"],
)
def test_two_hosts_hand_over(
    known: Callable[[Path, str], dict[str, str]], proof: str, places: tuple[Place, Place], tmp_path: Path
) -> None:
    here, there = places
    asked = here.command(f"{half('prefill')} {here.address}", **known(tmp_path, "prefill"))
    with started(*asked, folder=tmp_path) as prefill:
        assert prefill.stdout is not None
        read = there.command(half("decode"), **known(tmp_path, "decode"))
        with started(*read, folder=tmp_path, stdin=prefill.stdout.fileno()) as decode:
            printed, errors = decode.communicate(timeout=BOUND_S)
            _, said = prefill.communicate(timeout=BOUND_S)
    assert decode.returncode == 0, printed + errors + said
    line = rf"decode: 3 blocks came by (\w+), every byte right; prefill showed {proof}\n"
    found = re.fullmatch(line, printed)
    assert found is not None, printed
    assert found[1] == "tcp" or here.host is None
    assert (prefill.returncode, said) == (0, "prefill: decode-0 has the pages; the blocks are free\n")


def test_a_host_with_another_secret_gets_nothing(places: tuple[Place, Place], tmp_path: Path) -> None:
    here, there = places
    asked = here.command(f"{half('prefill')} {here.address}", **with_secret(tmp_path, "prefill"))
    with started(*asked, folder=tmp_path) as prefill:
        assert prefill.stdout is not None
        other = with_secret(tmp_path, "decode", "another secret, which is as long")
        with started(
            *there.command(half("decode"), **other), folder=tmp_path, stdin=prefill.stdout.fileno()
        ) as decode:
            printed, errors = decode.communicate(timeout=BOUND_S)
    assert (decode.returncode, printed) == (1, "")
    assert "[auth-failed" in errors


# ---- a transport of one's own -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)  # it compiles kvxfer's core
def test_a_transport_outside_of_the_tree_keeps_the_contracts() -> None:
    if missing := [tool for tool in ("cmake", "ninja", "c++") if shutil.which(tool) is None]:
        pytest.skip(f"no {', '.join(missing)}")
    # As `make native-build-plain` compiles, and as deep in the tree: a compiler cache has most of it.
    build = ROOT / "build" / "own-transport"
    flags = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O2 -g1"]
    for command in (
        ["cmake", "-S", str(EXAMPLES / "own_transport"), "-B", str(build), *flags],
        ["cmake", "--build", str(build), "--target", "test_procmem"],
        [str(build / "test_procmem")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(r"^\d+ passed, 0 failed", done.stdout, re.MULTILINE)


# ---- pages ------------------------------------------------------------------------------------------


def files() -> dict[str, Path]:
    found = (path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(EXAMPLES)): path for path in found}


def test_each_example_is_run_and_has_a_page() -> None:
    assert files().keys() == PAGES.keys()
    for name, page in PAGES.items():
        assert f"examples/{name}" in (ROOT / "docs" / page).read_text(), f"docs/{page} has no {name}"


def test_each_tutorial_is_of_an_example() -> None:
    of_examples = {page for page in PAGES.values() if page.startswith("tutorials/")}
    tutorials = {f"tutorials/{path.name}" for path in TUTORIALS.glob("*.md")}
    assert tutorials - {"tutorials/index.md"} == of_examples


def test_what_tutorials_show_of_examples_is_there() -> None:
    sections = {
        f"examples/{name}:{section}"
        for name, path in files().items()
        for section in re.findall(r"--8<-- \[start:([\w-]+)\]", path.read_text())
    }
    for path in files().values():
        marks = re.findall(r"--8<-- \[(start|end):([\w-]+)\]", path.read_text())
        begun, ended = marks[::2], marks[1::2]
        assert [("end", section) for _, section in begun] == ended, path
    shown = {
        found
        for path in TUTORIALS.glob("*.md")
        for found in re.findall(r'^\s*--8<-- "([^"]+)"$', path.read_text(), re.MULTILINE)
    }
    whole = {f"examples/{name}" for name in files()}
    assert shown <= sections | whole, shown - sections - whole
    assert sections <= shown, f"no tutorial shows {sections - shown}"


def test_tutorials_show_the_lines_that_are_printed() -> None:
    for example in (*RUN, GPU_PAIR):
        text = (ROOT / "docs" / example.page).read_text()
        for lines in (example.lines, *example.dies.values()):
            for pattern in lines:
                assert re.search(f"^{pattern}$", text, re.MULTILINE), f"docs/{example.page}: {pattern}"
