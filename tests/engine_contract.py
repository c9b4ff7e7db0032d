"""What an engine's classes promise a connector, written down by release, and what has moved since.

Signatures alone, one line a member. An engine's own module says which classes (`Engine`), and writes down the
one that is installed.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Class -> member -> what it is: ``"abstract method (self, request, data=)"``, ``"field ="``; ``=`` where it
#: may be left out.
Contract = dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Drift:
    """One thing that is not as it was written down.

    Attributes
    ----------
    owner, member
        Which; a class that is gone as a whole has no member.
    words
        What moved.
    """

    owner: str
    member: str
    words: str

    def __str__(self) -> str:
        return f"{self.owner}{'.' if self.member else ''}{self.member} {self.words}"


@dataclass(frozen=True, slots=True)
class Engine:
    """Of what an engine's promises are written down.

    Attributes
    ----------
    folder
        Where they stand, a file for each release.
    parts
        How many numbers of a version make a release.
    classes
        That the connector is made of, fills in or reads, by module.
    bases
        Classes of which ours is one: their private members are ours as well.
    functions
        That it calls or hooks, by module.
    annotated
        Classes whose members are declared, and set by others.
    """

    folder: Path
    parts: int
    classes: Mapping[str, Sequence[str]]
    bases: Sequence[str]
    functions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    annotated: Sequence[str] = ()

    # ---- writing down -----------------------------------------------------------------------

    def installed(self) -> Contract:
        """Writes down the engine that is installed. What is gone is left out."""
        contract: Contract = {}
        for _, name, cls in _found(self.classes):
            contract[name] = describe(cls, with_private=name in self.bases)
            if name in self.annotated:
                contract[name] |= dict.fromkeys(inspect.get_annotations(cls), "attribute")
        for module, name, function in _found(self.functions):
            contract.setdefault(module, {})[name] = _kind(function)
        return contract

    # ---- reading ----------------------------------------------------------------------------

    def recorded(self) -> dict[tuple[int, ...], Contract]:
        """Returns what was written down, by release, the oldest first."""
        return {
            release: json.loads(path.read_text())
            for release, path in sorted(
                (self.release_of(path.stem), path) for path in self.folder.glob("*.json")
            )
        }

    def release_of(self, version: str) -> tuple[int, ...]:
        """Returns the release of a version."""
        return tuple(int(part) for part in version.split(".")[: self.parts])


def _found(named: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, Any]]:
    for module_name, names in named.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for name in names:
            if (found := getattr(module, name, None)) is not None:
                yield module_name, name, found


# ---- what a class is ------------------------------------------------------------------------


def describe(cls: type, with_private: bool = False) -> dict[str, str]:
    """Returns what each member of a class is, those of its bases in the same package among them."""
    members: dict[str, str] = {}
    package = cls.__module__.partition(".")[0]
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] == package:
            members |= dict.fromkeys(_set_in_init(base), "attribute")
            members |= {name: _kind(value) for name, value in vars(base).items()}
    if dataclasses.is_dataclass(cls):
        members |= {field.name: f"field{_default(field)}" for field in dataclasses.fields(cls)}
    if issubclass(cls, enum.Enum):
        members |= {each.name: "value" for each in cls}  # which number it is, is nobody's business
    return {
        name: what
        for name, what in sorted(members.items())
        if what and (not name.startswith("_") or (with_private and _is_for_subclasses(name)))
    }


def _is_for_subclasses(name: str) -> bool:
    # Beside what Python and ABC keep for themselves.
    return name == "__init__" or not name.startswith(("__", "_abc"))


def _kind(value: Any) -> str:
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    abstract = "abstract " if getattr(value, "__isabstractmethod__", False) else ""
    if isinstance(value, property):
        return f"{abstract}property"
    if inspect.isfunction(function):
        kind = type(value).__name__ if isinstance(value, classmethod | staticmethod) else "method"
        return f"{abstract}{kind} ({', '.join(_parameters(function))})"
    return "" if isinstance(value, type) else "attribute"


def _parameters(function: Any) -> Iterator[str]:
    for each in inspect.signature(function).parameters.values():
        stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        yield f"{stars}{each.name}{'' if each.default is each.empty else '='}"


def _default(field: dataclasses.Field[Any]) -> str:
    missing = dataclasses.MISSING
    return "" if field.default is missing and field.default_factory is missing else " ="


def _set_in_init(cls: type) -> Iterator[str]:
    init = vars(cls).get("__init__")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(init))) if init is not None else None
    except (OSError, TypeError):  # a dataclass's, of which there is no source
        return
    for node in ast.walk(tree) if tree is not None else ():
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


# ---- what a connector uses ------------------------------------------------------------------


def names_in(folder: Path) -> set[str]:
    """Returns every name that the sources of a folder define, read or pass: what may be an engine's."""
    found: set[str] = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.add(node.func.id)
    return found


# ---- what moved -----------------------------------------------------------------------------


def drift(before: Contract, now: Contract) -> list[Drift]:
    """Returns all that is not as it was."""
    found = []
    for owner, members in before.items():
        if owner not in now:
            found.append(Drift(owner, "", "is gone"))
            continue
        found += [
            Drift(owner, name, words)
            for name, what in members.items()
            for words in _moved(what, now[owner].get(name))
        ]
        found += [
            Drift(owner, name, f"is new: {what}") for name, what in now[owner].items() if name not in members
        ]
    return found


def concerns(found: list[Drift], names: set[str], given: set[str]) -> list[Drift]:
    """Returns what touches a connector that uses these names and gives these methods."""
    return [each for each in found if _matters(each, names, given)]


def _matters(each: Drift, names: set[str], given: set[str]) -> bool:
    if each.words.startswith("is new: abstract "):
        return each.member not in given
    if each.words.startswith("is new: "):
        # A field that must be given, of what the connector makes.
        return each.words == "is new: field" and each.owner in names
    return not each.member or each.member in names or each.member == "__init__"


def _moved(before: str, now: str | None) -> Iterator[str]:
    if now is None:
        yield f"was removed (it was {before})"
        return
    kind, old = _split(before)
    new_kind, new = _split(now)
    if kind != new_kind:
        yield f"is {new_kind.strip()} now, it was {kind.strip()}"
        return
    gone = [name for name in old if name not in new]
    come = [name for name in new if name not in old]
    for name in list(gone):
        # Another name in the same place.
        place = list(old).index(name)
        if place < len(new) and (other := list(new)[place]) in come:
            yield f"calls its parameter {name} {other} now"
            gone.remove(name)
            come.remove(other)
    yield from (f"has no parameter {name} any more" for name in gone)
    for name in come:
        yield f"has a new parameter {name}" + (", which may be left out" if new[name] else "")
    if [name for name in old if name in new] != [name for name in new if name in old]:
        yield f"has its parameters in another order: {', '.join(new)}"
    for name in old.keys() & new.keys():
        if old[name] and not new[name]:
            yield f"needs its parameter {name}, which could be left out"


def _split(what: str) -> tuple[str, dict[str, bool]]:
    """Returns the kind, and of each parameter whether it may be left out."""
    kind, bracket, rest = what.partition("(")
    names = [name for name in rest.rstrip(")").split(", ") if name] if bracket else []
    if kind.startswith("field"):
        return "a field", {"value": kind.endswith("=")}
    return kind.strip(), {
        name.removesuffix("="): name.endswith("=") or name.startswith("*") for name in names
    }


# ---- an override ----------------------------------------------------------------------------


def misfits(overrides: Mapping[str, str], base: Mapping[str, str]) -> list[str]:
    """Returns in words which methods of a connector the engine cannot call as it calls its base's."""
    found = []
    for name, what in overrides.items():
        kind, parameters = _split(what)
        base_kind, base_parameters = _split(base[name].removeprefix("abstract "))
        if kind != base_kind:
            found.append(f"{name} is a {kind}, the engine's a {base_kind}")
            continue
        ours, theirs = list(parameters), list(base_parameters)
        # By place or by name: both must fit.
        if ours[: len(theirs)] != theirs:
            found.append(f"{name} takes ({', '.join(ours)}), the engine gives ({', '.join(theirs)})")
            continue
        found += [
            f"{name} needs {each}, which the engine {'may leave out' if each in theirs else 'does not give'}"
            for each in ours
            if not parameters[each] and base_parameters.get(each, True)
        ]
    return found
