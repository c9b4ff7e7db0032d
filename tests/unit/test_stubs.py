"""The stubs of the compiled modules name what the modules have, and nothing else.

mypy's stubtest does not see nanobind's functions as functions, so this compares names and argument
names itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvxfer
from tests.unit.conftest import FakeCore, FakeHandle, FakeRoute

PACKAGE = Path(kvxfer.__file__).parent
STUBS = {"kvxfer._native": "_native.pyi", "kvxfer.bench._limits": "bench/_limits.pyi"}

Definition = ast.FunctionDef | ast.ClassDef | ast.AnnAssign


def definitions(body: list[ast.stmt]) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def stub_arguments(function: ast.FunctionDef) -> list[str]:
    names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
    return [name for name in names if name != "self"]


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
    names = public(vars(actual))
    words = [f"{where}.{name} is in the stub alone" for name in sorted(public(stub) - names)]
    words += [f"{where}.{name} is in the module alone" for name in sorted(names - public(stub))]
    for name, node in stub.items():
        if name not in vars(actual):
            continue
        value = vars(actual)[name]
        if isinstance(node, ast.ClassDef):
            if not (inspect.isclass(value) and not issubclass(value, BaseException)):
                continue
            words += differences(f"{where}.{name}", definitions(node.body), value)
        elif isinstance(node, ast.FunctionDef) and hasattr(value, "__nb_signature__"):
            wanted, given = stub_arguments(node), module_arguments(value)
            if wanted != given:
                words.append(f"{where}.{name} takes {given}, in the stub {wanted}")
    return words


# ---- what stands in for them in unit tests ---------------------------------------------------------


def stub_parameters(function: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """Names, kinds, and whether they may be left out; as `parameters` has them of a function."""
    given = function.args
    assert given.vararg is given.kwarg is None
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    found = []
    for at, one in enumerate(positional):
        kind = "positional-only" if at < len(given.posonlyargs) else "positional or keyword"
        found.append((one.arg, kind, at >= first_default))
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append((one.arg, "keyword-only", default is not None))
    return found


def parameters(function: Callable[..., Any]) -> list[tuple[str, str, bool]]:
    return [
        (one.name, one.kind.description, one.default is not one.empty)
        for one in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(
    ("name", "fake"), [("AgentCore", FakeCore), ("Handle", FakeHandle), ("Route", FakeRoute)]
)
def test_a_fake_has_nothing_that_the_real_one_has_not(name: str, fake: type) -> None:
    """Same names, parameters and kinds. What a fake lacks fails in the test that needs it."""
    native = definitions(ast.parse((PACKAGE / STUBS["kvxfer._native"]).read_text()).body)[name]
    assert isinstance(native, ast.ClassDef)
    real = definitions(native.body)
    for verb in public(vars(fake)):
        assert verb in real, f"{verb} is the fake's alone"
        there, here = real[verb], vars(fake)[verb]
        assert isinstance(there, ast.FunctionDef)
        is_property = any(ast.unparse(one) == "property" for one in there.decorator_list)
        assert is_property == isinstance(here, property), verb
        if not is_property:
            assert parameters(here) == stub_parameters(there), verb


def test_events_of_a_fake_have_the_fields_of_real_ones() -> None:
    native = definitions(ast.parse((PACKAGE / STUBS["kvxfer._native"]).read_text()).body)["Event"]
    assert isinstance(native, ast.ClassDef)
    core = FakeCore("fake", {"listen": ""})
    core.happen("peer-up", peer=1)
    (event,) = core.drain()
    assert set(vars(event)) == public(definitions(native.body))
    for fd in (core.event_fd, core.sockets_fd):
        os.close(fd)


# ---- the modules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUBS)
def test_stub_names_what_the_module_has(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    stub = definitions(ast.parse((PACKAGE / STUBS[name]).read_text()).body)
    assert differences(name, stub, module) == []
