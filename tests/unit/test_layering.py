"""Dependencies point down only: contracts of pyproject.toml for Python, tables here for native code."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

importlinter = pytest.importorskip("importlinter", reason="import-linter is not installed")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvxfer"
CONNECTORS = ROOT / "connectors"
NATIVE = ROOT / "native"
CONTRACTS = {
    each["id"]: each["name"]
    for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}

# ---- Python ---------------------------------------------------------------------------------------

# An import that breaks each contract, and the file in which it stands.
WRONG = {
    "layout": ("layout/axes.py", "import kvxfer.naming"),
    "memory": ("memory/pool.py", "from kvxfer import plan"),
    "plan": ("plan/units.py", "import kvxfer._native"),
    "directory": ("directory/entry.py", "from kvxfer.layout import kv_layout"),
    "daemon-link": ("daemon_link/frames.py", "from kvxfer.peer import Peer"),
    "above": ("session/posting.py", "if TYPE_CHECKING:\n    from kvxfer.agent import Agent"),
    "native": ("connectors/common/mail.py", "def late():\n    from kvxfer._native import CODES"),
    "pure": ("memory/topology.py", "import socket"),
    "numpy": ("layout/tensor.py", "import torch"),
    "control": ("control/state/reserve.py", "import kvxfer.control.daemon.node"),
    "host-pool": ("control/host_pool/tenants.py", "from kvxfer.control.host_pool import page_pool"),
    "connectors": ("connectors/nixl/__init__.py", "import kvxfer.connectors.vllm"),
    "engines": ("connectors/common/step.py", "import tensorrt_llm.bindings"),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as a wheel has it: in an editable installation other folders are part of its path, too."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.cubin", "native")
    shutil.copytree(PACKAGE, tmp_path / "kvxfer", ignore=ignored)
    (tmp_path / "kvxfer/_native.py").touch()
    return tmp_path


def broken(folder: Path) -> tuple[set[str], str]:
    """Returns the broken contracts, and what import-linter prints."""
    # Without `site`, which would load the editable package.
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-S", "-c", linter, "--no-cache", "--no-logo", ROOT / "pyproject.toml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(importlinter.__file__).parents[1]), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    told = dict(re.findall(r"^(.+) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
    assert told.keys() == set(CONTRACTS.values()), done.stdout + done.stderr
    return {each for each, name in CONTRACTS.items() if told[name] == "BROKEN"}, done.stdout


def test_modules_import_what_contracts_allow(copy: Path) -> None:
    found, told = broken(copy)
    assert not found, told


def test_every_contract_can_be_broken(copy: Path) -> None:
    for name, line in WRONG.values():
        with (copy / "kvxfer" / name).open("a") as file:
            file.write(f"\n{line}\n")
    assert broken(copy)[0] == WRONG.keys() == CONTRACTS.keys()


def python_files(folder: Path) -> Iterator[Path]:
    """Sources of a folder, without linked files."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from python_files(path)
        elif path.suffix == ".py":
            yield path


def test_every_name_of_a_module_stands_once() -> None:
    """Except programs; what the doctor serves and what the daemon does; schemas of JSON and of documents."""
    files = [*python_files(PACKAGE), *python_files(CONNECTORS)]
    # Commands are called as what they run.
    stems = [path.stem for path in files if path.parent.name != "cli"]
    folders = {path.parent.name for path in files}
    once = sorted(stem for stem in stems if stem not in {"__init__", "__main__", "serve", "schema"})
    assert once == sorted(set(once) - folders)


def test_what_connectors_share_names_no_engine() -> None:
    for path in python_files(CONNECTORS / "common"):
        assert not re.search(r"vllm|sglang|trt-?llm|tensorrt", path.read_text(), re.IGNORECASE), path


# ---- native code ----------------------------------------------------------------------------------

OUTSIDE_TRANSPORTS = ("core", "bindings", "raw_agent", "include", "gpu")


def below_the_engine(*folders: str) -> str:
    return rf"core/(?:{'|'.join(folders)})/|core/(?!engine|runtime)[^/]+$|(?!core/)"


# What the files of a folder may include in quotation marks, by how it begins.
MAY_INCLUDE = {
    "include": r"kvxfer/",
    "gpu": r"(gpu|kvxfer)/",
    "core": r"(?!transports/|raw_agent/|store/)",
    "core/system": below_the_engine("system"),
    "core/tls": below_the_engine("tls"),
    "core/control": below_the_engine("control", "system", "tls"),
    "core/copy": below_the_engine("copy", "control", "system", "tls"),
    "core/engine": r"(?!core/(engine|runtime)\.h$)",
    "core/runtime": r"(?!core/runtime\.h$)",
    "raw_agent": r"(core|raw_agent|kvxfer)/",
    "store": r"(store|kvxfer)/|core/(copy/crc32c|system/\w+)\.h$",
    "bindings": r"(core|raw_agent|store|gpu|kvxfer|bindings)/|[^/]+$",
    "transports": r"(?!core/runtime|core/engine|bindings/|raw_agent/)",
    **{
        f"transports/{path.name}": rf"transports/({path.name}|common|fabric|stream)/|(?!transports/)"
        for path in (NATIVE / "transports").iterdir()
        if any(path.iterdir())
    },
}
# Each may include only those before it (native/DESIGN.md, "The engine's parts" and "The runtime's parts").
PARTS = {
    "engine": (
        "timers context sessions messages pace peer_limits transfer_end transfer_table parked rails redials"
        " regions peer_regions programs handles records leases tag_memory expectations admission draining"
        " transfer_owner fence_slots arrivals sums turns eager sources destinations posting"
    ),
    "runtime": "clock watched_secrets watched_credentials kept_memory rail_table listeners connections",
}
OTHER_HALF = {"destination_pieces": "destinations", "connections_dialled": "connections"}


def cpp_files(folder: str) -> list[Path]:
    return [path for path in (NATIVE / folder).rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]


def includes(path: Path) -> set[str]:
    return set(re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_native_folders_include_those_below_them_alone(folder: str) -> None:
    files = cpp_files(folder)
    assert files
    for path in files:
        wrong = [name for name in includes(path) if not re.match(MAY_INCLUDE[folder], name)]
        assert not wrong, path


@pytest.mark.parametrize("folder", PARTS)
def test_parts_of_the_engine_and_the_runtime_include_those_before_them_alone(folder: str) -> None:
    order = {name: place for place, name in enumerate(PARTS[folder].split())}
    for path in cpp_files(f"core/{folder}"):
        for name in includes(path):
            if name.startswith(f"core/{folder}/"):
                part, own = (OTHER_HALF.get(stem, stem) for stem in (Path(name).stem, path.stem))
                assert order[part] <= order[own], f"{path} includes {name}"


def test_public_headers_are_free_of_python_and_cuda() -> None:
    for path in cpp_files("include"):
        assert not re.search(r"#\s*include\s*[<\"](Python|nanobind|cuda)", path.read_text()), path


def transports() -> set[str]:
    """The registered transports; each has a folder and a line."""
    lines = (NATIVE / "CMakeLists.txt").read_text()
    names = set(re.findall(r"^kvxfer_transport\((\w+)\)", lines, re.MULTILINE))
    folders = {path.name for path in (NATIVE / "transports").iterdir() if any(path.iterdir())}
    assert folders - names == {"common", "fabric", "stream"}
    assert names <= folders
    return names


def quoted_in(path: Path) -> set[str]:
    """Whole string literals of a source, without its comments and docstrings."""
    text = path.read_text()
    if path.suffix == ".py":
        literals = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        return {value for value in literals if isinstance(value, str)}
    return set(re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r"//[^\n]*", "", text)))


def test_no_transport_is_named_outside_its_folder_and_the_registry() -> None:
    names = transports()
    sources = [path for folder in OUTSIDE_TRANSPORTS for path in cpp_files(folder)]
    for path in [*sources, *python_files(PACKAGE)]:
        assert not quoted_in(path) & names, f"{path} names {quoted_in(path) & names}"


def test_bindings_take_pythons_lock_in_one_place() -> None:
    """Elsewhere a thread that the interpreter's end meets would abort the process (native/bindings/gil.h)."""
    named = re.compile(r"gil_scoped_(acquire|release)|PyEval_(Save|Restore)Thread|PyGILState_Ensure")
    found = {path.name for path in (NATIVE / "bindings").iterdir() if named.search(path.read_text())}
    assert found == {"gil.h"}
