"""What Python, native code and NVIDIA's driver must have alike: words, numbers, sizes, arguments, structs.

And functions of the core that must not throw take no memory, or have a handler for when there is none.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kvxfer._native", reason="the native module is not built")

import kvxfer
from kvxfer import _native
from kvxfer.errors import CODE_NAMES
from kvxfer.session.records import RECORD_NBYTES
from tests.noexcept import findings
from tests.unit.conftest import FakeCore, FakeHandle, FakeRoute

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
DRIVER_ABI = ROOT / "tests/native/cuda_abi/driver_abi.cpp"


def found(file: str | Path, pattern: str) -> list[Any]:
    return re.findall(pattern, (NATIVE / file).read_text(), re.MULTILINE)


def words_in(file: str, function: str) -> set[str]:
    """The words of the table that a native function returns from."""
    body = (NATIVE / file).read_text().partition(function)[2]
    (table,) = re.findall(r"kNames(?:\[\])? = \{([^}]*)\}", body)[:1]
    return set(re.findall(r'"([^"]+)"', table))


def codes_of_status_h() -> dict[int, str]:
    codes = found("include/kvxfer/status.h", r"^\s+k(\w+) = (\d+),")
    return {int(code): re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower() for name, code in codes}


def compared_with_nvidia() -> list[tuple[str, str]]:
    """The driver's functions that the check compiles beside NVIDIA's, those of one version last."""
    versions = [
        (name, f"{pfn}_v{v}") for name, pfn, v in found(DRIVER_ABI, r"_AS\((\w+), PFN_(\w+)_v(\d+)\)")
    ]
    return [*found(DRIVER_ABI, r"KVXFER_SAME\((\w+), (\w+)\);"), *sorted(versions)]


def looked_up_in_the_driver() -> list[tuple[str, str]]:
    versions = found("gpu/driver.cpp", r'find_if_there\(driver\.(\w+), "(\w+)", (\d+)\)')
    told = [(name, f"{symbol}_v{version}") for name, symbol, version in versions]
    return [*found("gpu/driver.cpp", r'find\(driver\.(\w+), "(\w+)"\)'), *sorted(told)]


AGREED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "codes of status.h": (codes_of_status_h, lambda: {0: "ok", **CODE_NAMES}),
    "codes of the module": (
        lambda: {number: name for name, number in _native.CODES.items() if number},
        lambda: CODE_NAMES,
    ),
    "states of transfers": (
        lambda: words_in("bindings/transfer.cpp", "PyHandle::state"),
        lambda: set(kvxfer.TransferState),
    ),
    # What became of leases that native code has forgotten is Python's to say.
    "states of leases": (
        lambda: words_in("core/lease.cpp", "name_of(LeaseState") | {"ended"},
        lambda: set(kvxfer.LeaseState),
    ),
    "size of a record": (
        lambda: found("core/record.h", r"sizeof\(Record\) == (\d+)"),
        lambda: [str(RECORD_NBYTES)],
    ),
    "functions of the driver": (looked_up_in_the_driver, compared_with_nvidia),
}


@pytest.mark.parametrize("what", AGREED)
def test_both_sides_have_the_same(what: str) -> None:
    one, other = (side() for side in AGREED[what])
    assert one
    assert one == other


# ---- stubs ----------------------------------------------------------------------------------------

# mypy's stubtest does not see nanobind's functions as functions.
STUBS = {"kvxfer._native": "_native.pyi", "kvxfer.bench._limits": "bench/_limits.pyi"}

Definition = ast.FunctionDef | ast.ClassDef | ast.AnnAssign


def definitions(body: list[ast.stmt]) -> dict[str, Definition]:
    defined: dict[str, Definition] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined[node.target.id] = node
    return defined


def stub(module: str) -> dict[str, Definition]:
    return definitions(ast.parse((ROOT / "kvxfer" / STUBS[module]).read_text()).body)


def native_class(name: str) -> dict[str, Definition]:
    node = stub("kvxfer._native")[name]
    assert isinstance(node, ast.ClassDef)
    return definitions(node.body)


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def module_arguments(function: Any) -> list[str]:
    """Argument names of a nanobind function, from the signature that it carries."""
    signature = function.__nb_signature__[0][0]
    # "def f(self, a: int, b: ndarray[dtype=uint8, shape=(*)] = \\0) -> int", brackets taken out
    # from the innermost on, so that a comma separates arguments and nothing else.
    while (flat := re.sub(r"\[[^\[\]]*\]", "", signature)) != signature:
        signature = flat
    inside = signature[signature.index("(") + 1 : signature.rindex(")")]
    names = [re.split("[:=]", argument)[0].strip() for argument in inside.split(",")]
    return [name for name in names if name not in ("", "self", "/", "*")]


def differences(where: str, stub: dict[str, Definition], actual: Any) -> list[str]:
    words = [f"{where}.{name} is on one side alone" for name in public(stub) ^ public(vars(actual))]
    for name, node in stub.items():
        value = vars(actual).get(name)
        if isinstance(node, ast.ClassDef):
            if inspect.isclass(value) and not issubclass(value, BaseException):
                words += differences(f"{where}.{name}", definitions(node.body), value)
        elif isinstance(node, ast.FunctionDef) and hasattr(value, "__nb_signature__"):
            wanted = [each.arg for each in node.args.posonlyargs + node.args.args if each.arg != "self"]
            if wanted != (given := module_arguments(value)):
                words.append(f"{where}.{name} takes {given}, in the stub {wanted}")
    return words


@pytest.mark.parametrize("name", STUBS)
def test_stub_names_what_the_module_has(name: str) -> None:
    assert differences(name, stub(name), importlib.import_module(name)) == []


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, bool]]:
    """Names, kinds, and whether they may be left out."""
    return [
        (one.name, one.kind.description, one.default is not one.empty)
        for one in inspect.signature(function).parameters.values()
    ]


def stub_parameters(function: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """The same of a stub."""
    given = function.args
    assert given.vararg is given.kwarg is None
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    told = []
    for at, one in enumerate(positional):
        kind = "positional-only" if at < len(given.posonlyargs) else "positional or keyword"
        told.append((one.arg, kind, at >= first_default))
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        told.append((one.arg, "keyword-only", default is not None))
    return told


@pytest.mark.parametrize(
    ("name", "fake"), [("AgentCore", FakeCore), ("Handle", FakeHandle), ("Route", FakeRoute)]
)
def test_a_fake_has_nothing_that_the_real_one_has_not(name: str, fake: type) -> None:
    """Same names, parameters and kinds. What a fake lacks fails in the test that needs it."""
    real = native_class(name)
    for verb in public(vars(fake)):
        assert verb in real, f"{verb} is the fake's alone"
        there, here = real[verb], vars(fake)[verb]
        assert isinstance(there, ast.FunctionDef)
        is_property = any(ast.unparse(one) == "property" for one in there.decorator_list)
        assert is_property == isinstance(here, property), verb
        if not is_property:
            assert parameters(here) == stub_parameters(there), verb


def test_events_of_a_fake_have_the_fields_of_real_ones() -> None:
    core = FakeCore("fake", {"listen": ""})
    core.happen("peer-up", peer=1)
    (event,) = core.drain()
    assert set(vars(event)) == public(native_class("Event"))
    for fd in (core.event_fd, core.sockets_fd):
        os.close(fd)


# ---- NVIDIA's driver ------------------------------------------------------------------------------


def compiles(native: Path) -> str:
    """Returns what the compiler says of our declarations beside NVIDIA's headers, which a wheel brings."""
    try:
        files = importlib.metadata.files("nvidia-cuda-runtime") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("`make unit` installs nvidia-cuda-runtime (pyproject.toml, dev)")
    headers = next(Path(str(file.locate())).parent for file in files if file.name == "cuda.h")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "what built the native module is gone: install a C++ compiler"
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-isystem{headers}", f"-I{native}"]
    done = subprocess.run(
        [*command, f"-I{NATIVE / 'include'}", DRIVER_ABI], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or done.stderr
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        ("int (*stream_write)(Stream stream, Address address,", "int (*stream_write)(Address address,"),
        ("int (*context_synchronize)();", "int (*context_synchronize)(unsigned flags);"),
        ("std::size_t src_x_nbytes = 0, src_y = 0;", "std::size_t src_y = 0, src_x_nbytes = 0;"),
        ("unsigned flags = 1; ", "unsigned flags = 2; "),
        ("kFabricHandle = 8;", "kFabricHandle = 4;"),
        ("unsigned char compression = 0, rdma_capable = 0;", "unsigned short compression = 0;"),
    ],
)
def test_what_is_declared_is_what_nvidia_declares_and_what_differs_does_not_compile(
    right: str, wrong: str, tmp_path: Path
) -> None:
    text = (NATIVE / "gpu/driver.h").read_text()
    assert not right or text.count(right) == 1
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/driver.h").write_text(text.replace(right, wrong) if right else text)
    assert ("driver_abi.cpp" in compiles(tmp_path)) == bool(right)


# ---- what must not throw --------------------------------------------------------------------------

BUILD = "cp{0}{1}-cp{0}{1}-linux_{2}".format(*sys.version_info[:2], platform.machine())
CORE = ROOT / "build" / BUILD / "native/libkvxfer_core.a"

# Functions, by the beginnings of their names, that may; each with its reason.
MAY = {
    "kvxfer::fabric::Endpoint::": "nine letters fit into a string itself",
    "kvxfer::FaultyTransport::": "faults are injected by tests alone",
    "kvxfer::Runtime::~Runtime": "closes an agent that nobody has closed",
    "kvxfer::raw_agent::Agent::~Agent": "the same",
}


reads_machine_code = pytest.mark.skipif(
    platform.machine() != "x86_64" or any(shutil.which(tool) is None for tool in ("g++", "nm", "objdump")),
    reason="reads x86-64 code of g++",
)


def shared(to: Path, *parts: str) -> Path:
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(to), *parts], check=True, capture_output=True)
    return to


@reads_machine_code
@pytest.mark.skipif(not CORE.exists(), reason="the core was built elsewhere")
def test_no_function_of_the_core_dies_for_want_of_memory(tmp_path: Path) -> None:
    """Mend by a handler, by room that is made before (core/in_room.h), or by leaving out noexcept."""
    whole = "-Wl,--whole-archive", str(CORE), "-Wl,--no-whole-archive"
    dying = findings(shared(tmp_path / "core.so", *whole))
    for name in MAY:
        assert any(found.startswith(name) for found in dying), f"the check no longer finds {name}"
    dying = {name: calls for name, calls in dying.items() if not name.startswith(tuple(MAY))}
    assert not dying, "\n".join(
        f"{re.sub(r'std::allocator<[^<>]*>', '...', name)} calls {', '.join(sorted(calls))}"
        for name, calls in sorted(dying.items())
    )
