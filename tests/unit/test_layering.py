"""Dependencies point down only: which module may import which, read off the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvxfer"
NATIVE = ROOT / "native"

# Whom each folder may know beside itself; what stands at the top is a public noun or what all stand on.
MAY_KNOW = {
    "layout": {"errors"},
    "memory": {"errors", "arguments", "_native", "layout"},
    "plan": {"errors", "layout", "memory"},
    # Of layouts, only the schema of JSON objects.
    "directory": {"address", "errors", "layout", "log", "loop_thread", "naming"},
}
# What the agent's and the daemon's side of the attachment stand on knows of neither.
SPOKEN = {"frames": set[str](), "runtime_folder": {"errors"}, "connection": {"attachment"}}
# The packages at the top, and the agent, which brings the others together.
ABOVE = {"agent", "bench", "cli", "connectors", "control", "doctor", "testing"}
# The modules that call the native core, each for its own noun.
MAY_IMPORT_NATIVE = {
    "agent.py",
    "arguments.py",
    "door.py",
    "attachment/agent_state.py",
    "attachment/calls.py",
    "attachment/link.py",
    "gpu/calibration.py",
    "gpu/command_ring.py",
    "gpu/copy_stream.py",
    "gpu/peer_pages.py",
    "gpu/shareable.py",
    "gpu/store_offer.py",
    "gpu/trigger.py",
    "lease.py",
    "memory/pool.py",
    "peer.py",
    "region.py",
    "session/completion.py",
    "session/inbox.py",
    "session/moving.py",
    "session/region_table.py",
    "session/connecting.py",
    "session/dials.py",
    "session/peer_table.py",
    "session/posting.py",
    "session/program_cache.py",
    "session/steering.py",
    "session/transport_registry.py",
    "transfer.py",
}
NUMPY_ALONE = sorted(
    str(path.relative_to(PACKAGE))
    for folder in ("layout", "plan")
    for path in (PACKAGE / folder).glob("*.py")
    if path.name != "tensor.py"  # reads tensors of other libraries through ctypes
)
PURE = (
    *NUMPY_ALONE,
    "layout/tensor.py",
    "memory/block_table.py",
    "memory/free_list.py",
    "memory/topology.py",
    "errors.py",
)

OUTSIDE_TRANSPORTS = ("core", "bindings", "door", "include", "gpu")
# Folders beside those of the transports.
SHARED_BY_TRANSPORTS = {"common", "fabric", "stream"}

PURE_LIBRARY = {
    "base64",
    "binascii",
    "collections",
    "dataclasses",
    "itertools",
    "json",
    "math",
    "operator",
    "typing",
}


def imports(path: Path, *, types_too: bool = False) -> set[str]:
    """Modules that a file imports anywhere in it, dotted; those under TYPE_CHECKING only if asked for."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
            and not types_too
        ):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def python_files(folder: Path) -> Iterator[Path]:
    """Sources of a folder, without linked files."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from python_files(path)
        elif path.suffix == ".py":
            yield path


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_no_io(name: str) -> None:
    known = imports(PACKAGE / name, types_too=True)
    for module in known:
        assert not module.startswith(
            ("kvxfer._native", "asyncio", "threading", "socket", "select", "time", "kvxfer.agent")
        ), f"{name} imports {module}"


@pytest.mark.parametrize("name", NUMPY_ALONE)
def test_plans_and_layouts_need_numpy_alone(name: str) -> None:
    outside = {m.partition(".")[0] for m in imports(PACKAGE / name)} - {"kvxfer", "numpy", "__future__"}
    assert outside <= PURE_LIBRARY


def known_to(path: Path) -> set[str]:
    """Files and folders of the package that a file of it knows, types included."""
    known = {module.split(".")[1] for module in imports(path, types_too=True) if module.startswith("kvxfer.")}
    return {name for name in known if any(PACKAGE.glob(f"{name}*"))}


@pytest.mark.parametrize("folder", MAY_KNOW)
def test_folders_know_those_below_them_alone(folder: str) -> None:
    for path in python_files(PACKAGE / folder):
        assert known_to(path) <= MAY_KNOW[folder] | {folder}, path


@pytest.mark.parametrize("name", SPOKEN)
def test_what_agent_and_daemon_speak_knows_neither(name: str) -> None:
    assert known_to(PACKAGE / "attachment" / f"{name}.py") <= SPOKEN[name]


def test_the_agent_is_known_by_those_above_it_alone() -> None:
    for path in python_files(PACKAGE):
        place = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if place not in ABOVE | {"__init__", "__main__"}:
            assert not known_to(path) & ABOVE, path


# Programs; what the doctor serves and what the daemon does; of JSON objects, and of the daemon's documents.
STAND_OFTEN = {"__init__", "__main__", "serve", "schema"}


def test_every_name_of_a_module_stands_once() -> None:
    """Commands are called as what they run, and every folder has an ``__init__``."""
    files = [*python_files(PACKAGE), *python_files(ROOT / "connectors")]
    stems = [path.stem for path in files if path.parent.name != "cli"]
    folders = {path.parent.name for path in files}
    once = sorted(stem for stem in stems if stem not in STAND_OFTEN)
    assert once == sorted(set(once) - folders)


# Each may import only those before it, in the order in which a page meets them (its ``__init__``).
PARTS_OF_THE_HOST_POOL = (
    *("page", "page_layout", "slabs", "idle_pages", "tenants", "page_index"),
    *("pool_jobs", "page_news", "page_sources", "pool_regions", "filling", "page_leases"),
    *("page_pool", "page_desk"),
)


def test_parts_of_the_host_pool_know_those_before_them_alone() -> None:
    folder = PACKAGE / "control" / "host_pool"
    order = {name: place for place, name in enumerate(PARTS_OF_THE_HOST_POOL)}
    assert {path.stem for path in folder.glob("*.py")} == {*order, "__init__"}
    for path in folder.glob("*.py"):
        for module in imports(path, types_too=True):
            if module.startswith("kvxfer.control.host_pool."):
                assert order[module.split(".")[3]] < order[path.stem], f"{path} imports {module}"


def test_only_the_core_modules_know_the_native_one() -> None:
    for path in python_files(PACKAGE):
        if any(module.startswith("kvxfer._native") for module in imports(path)):
            assert str(path.relative_to(PACKAGE)) in MAY_IMPORT_NATIVE, path


def test_connectors_use_the_public_package() -> None:
    for path in python_files(ROOT / "connectors"):
        assert not any(module.startswith("kvxfer._native") for module in imports(path, types_too=True)), path


CONNECTORS = ROOT / "connectors"
ENGINES = sorted(
    path.parent.name for path in CONNECTORS.glob("*/__init__.py") if path.parent.name != "common"
)


def test_what_connectors_share_knows_no_engine() -> None:
    for path in python_files(CONNECTORS / "common"):
        for module in imports(path, types_too=True):
            outside = module.partition(".")[0]
            assert outside not in {"vllm", "sglang", "tensorrt_llm"}, f"{path} imports {module}"
            assert not module.startswith(tuple(f"kvxfer.connectors.{engine}" for engine in ENGINES)), path
        assert not re.search(r"vllm|sglang|trt-?llm|tensorrt", path.read_text(), re.IGNORECASE), path


@pytest.mark.parametrize("engine", ENGINES)
def test_connectors_do_not_know_each_other(engine: str) -> None:
    for path in python_files(CONNECTORS / engine):
        for module in imports(path, types_too=True):
            if module.startswith("kvxfer.connectors."):
                assert module.split(".")[2] in {"common", engine}, f"{path} imports {module}"


def includes(path: Path) -> set[str]:
    return set(re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE))


def cpp_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh")]


def transports() -> set[str]:
    """The registered transports; each has a folder and a line."""
    lines = (NATIVE / "CMakeLists.txt").read_text()
    names = set(re.findall(r"^kvxfer_transport\((\w+)\)", lines, re.MULTILINE))
    folders = {path.name for path in (NATIVE / "transports").iterdir() if any(path.iterdir())}
    assert folders - names == SHARED_BY_TRANSPORTS
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
    sources = [path for folder in OUTSIDE_TRANSPORTS for path in cpp_files(NATIVE / folder)]
    for path in [*sources, *python_files(PACKAGE)]:
        assert not quoted_in(path) & names, f"{path} names {quoted_in(path) & names}"


def test_the_core_knows_transports_through_their_interface() -> None:
    for folder in OUTSIDE_TRANSPORTS:
        for path in cpp_files(NATIVE / folder):
            assert not any(name.startswith("transports/") for name in includes(path)), path


# Folders of the core that know no engine: whom each may know beside itself and the files at the top.
BELOW_THE_ENGINE = {
    "system": set[str](),
    "tls": set[str](),
    "control": {"system", "tls"},
    "copy": {"control", "system", "tls"},
}


@pytest.mark.parametrize("folder", BELOW_THE_ENGINE)
def test_folders_of_the_core_know_those_below_them_alone(folder: str) -> None:
    known = BELOW_THE_ENGINE[folder] | {folder}
    for path in cpp_files(NATIVE / "core" / folder):
        for name in includes(path):
            part, _, inner = name.removeprefix("core/").partition("/")
            if name.startswith("core/") and inner:
                assert part in known, f"{path} includes {name}"
            assert not name.startswith(("core/engine", "core/runtime")), f"{path} includes {name}"


# Each may include only those before it (native/DESIGN.md, "The engine's parts").
PARTS_OF_THE_ENGINE = (
    "timers",
    "context",
    "sessions",
    "messages",
    "pace",
    "peer_limits",
    "transfer_end",
    "transfer_table",
    "parked",
    "rails",
    "redials",
    "regions",
    "peer_regions",
    "programs",
    "handles",
    "records",
    "leases",
    "tag_memory",
    "expectations",
    "admission",
    "draining",
    "fence_slots",
    "arrivals",
    "sums",
    "turns",
    "eager",
    "sources",
    "destinations",
    "posting",
)


def test_parts_of_the_engine_know_those_above_them_alone() -> None:
    order = {name: place for place, name in enumerate(PARTS_OF_THE_ENGINE)}
    order["destination_pieces"] = order["destinations"]  # the other half of that class
    for path in cpp_files(NATIVE / "core" / "engine"):
        for name in includes(path):
            assert name not in ("core/engine.h", "core/runtime.h"), f"{path} includes {name}"
            if name.startswith("core/engine/"):
                assert order[Path(name).stem] <= order[path.stem], f"{path} includes {name}"


# The same for the runtime (native/DESIGN.md, "The runtime's parts").
PARTS_OF_THE_RUNTIME = (
    "clock",
    "watched_secrets",
    "watched_credentials",
    "kept_memory",
    "rail_table",
    "listeners",
    "connections",
)


def test_parts_of_the_runtime_know_those_above_them_alone() -> None:
    order = {name: place for place, name in enumerate(PARTS_OF_THE_RUNTIME)}
    order["connections_dialled"] = order["connections"]  # the other half of that class
    for path in cpp_files(NATIVE / "core" / "runtime"):
        for name in includes(path):
            assert name != "core/runtime.h", f"{path} includes it"
            if name.startswith("core/runtime/"):
                assert order[Path(name).stem] <= order[path.stem], f"{path} includes {name}"


def test_transports_do_not_know_each_other_nor_the_engine() -> None:
    for path in cpp_files(NATIVE / "transports"):
        kind = path.relative_to(NATIVE / "transports").parts[0]
        for name in includes(path):
            if name.startswith("transports/"):
                assert name.split("/")[1] in {kind, *SHARED_BY_TRANSPORTS}, f"{path} includes {name}"
            assert not name.startswith(("core/runtime", "core/engine", "bindings/")), (
                f"{path} includes {name}"
            )


def test_the_door_stands_on_the_core_and_nothing_of_it_on_the_door() -> None:
    for path in cpp_files(NATIVE / "door"):
        for name in includes(path):
            assert name.startswith(("core/", "door/", "kvxfer/")), f"{path} includes {name}"
    for folder in ("core", "include", "gpu", "transports"):
        for path in cpp_files(NATIVE / folder):
            assert not any(name.startswith("door/") for name in includes(path)), path


def test_bindings_include_what_they_bind_alone() -> None:
    for path in cpp_files(NATIVE / "bindings"):
        for name in includes(path):
            assert name.startswith(("core/", "door/", "gpu/", "kvxfer/", "bindings/")) or "/" not in name, (
                f"{path} includes {name}"
            )


def test_the_gpu_half_stands_on_the_interface_alone() -> None:
    for path in cpp_files(NATIVE / "gpu"):
        assert all(name.startswith(("gpu/", "kvxfer/")) for name in includes(path)), path


def test_public_headers_are_free_of_python_and_cuda() -> None:
    for path in cpp_files(NATIVE / "include"):
        text = path.read_text()
        assert not re.search(r"#\s*include\s*[<\"](Python|nanobind|cuda)", text), path
        assert all(name.startswith("kvxfer/") for name in includes(path)), path


def test_bindings_take_pythons_lock_in_one_place() -> None:
    """Elsewhere a thread that the interpreter's end meets would abort the process (native/bindings/gil.h)."""
    named = re.compile(r"gil_scoped_(acquire|release)|PyEval_(Save|Restore)Thread|PyGILState_Ensure")
    found = {path.name for path in (NATIVE / "bindings").iterdir() if named.search(path.read_text())}
    assert found == {"gil.h"}
