"""Documents: their links lead somewhere, and the commands, options and names in them are there."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("bench", "connectors", "deploy", "docs", "kvxfer", "native")
DOCUMENTS = sorted(
    {*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))}
)
# What a document calls an object, and what it is.
OBJECTS = {
    "agent": "Agent",
    "peer": "Peer",
    "region": "Region",
    "lease": "Lease",
    "pool": "Pool",
    "transfer": "Transfer",
    "incoming": "Incoming",
    "trigger": "Trigger",
}
# Options of other programs.
FOREIGN = {
    *("--kv-transfer-config", "--reuse-values", "--speculative-config", "--strict"),
    *("--disaggregation-decode-allocation-policy", "--disaggregation-decode-enable-radix-cache"),
    *("--disaggregation-decode-host-receive-threshold", "--disaggregation-mode"),
    *("--disaggregation-transfer-backend", "--log-level"),
}

every_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)


def fenced(text: str) -> list[str]:
    """Returns blocks of code."""
    return re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Returns what is around them."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def code(document: Path) -> list[str]:
    """Returns blocks and spans of code."""
    text = document.read_text()
    return [*fenced(text), *re.findall(r"`([^`\n]+)`", prose(text))]


def anchors(document: Path) -> set[str]:
    """Returns what a link can point at in a document, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@functools.cache
def defined() -> set[str]:
    """Returns options in quotation marks and variables of the environment, wherever they are in the code."""
    folders = ("bench", "connectors", "kvxfer", "native", "tests", ".ci")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h", "") and path.is_file() and path != Path(__file__)
    ]
    texts = (path.read_text(errors="ignore") for path in (*files, ROOT / "Makefile"))
    return {
        name
        for text in texts
        for found in re.finditer(r'"(--[a-z][\w-]+)"|\b(KVXFER_\w+)', text)
        for name in found.groups()
        if name
    }


@functools.cache
def kvxfer_command() -> Any:
    return importlib.import_module("typer.main").get_command(
        importlib.import_module("kvxfer.cli.app").build()
    )


def test_the_documents_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "docs/support.md",
        "kvxfer/LAYOUTS.md",
        "native/gpu/DESIGN.md",
    } <= names
    assert len(list(kvxfer_commands(ROOT / "docs/benchmarks.md"))) > 10


@every_document
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        found = document.parent / path if path else document
        assert found.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(found), f"{found.name} has no heading for {link}"


def kvxfer_commands(document: Path) -> Iterator[list[str]]:
    for piece in code(document):
        for line in piece.splitlines():
            if found := re.search(r"(?:^|[\s/])kvxfer ((?:bench|doctor)\b.*)", line.partition("#")[0]):
                yield found[1].split()


def options(words: list[str]) -> set[str]:
    """Returns the options of a command, `words` without ``kvxfer``; takes its names off them."""
    commands = [kvxfer_command()]
    while words and hasattr(commands[0], "commands") and re.fullmatch(r"[a-z|]+", words[0]):
        named = words.pop(0).split("|")
        commands = [command.commands[name] for command in commands for name in named]
    sets = [
        {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
        for command in commands
    ]
    return set.intersection(*sets)


@every_document
def test_commands_have_the_options_that_are_written(document: Path) -> None:
    pytest.importorskip("typer", reason="the extra cli is not installed")
    for words in kvxfer_commands(document):
        known = options(words)
        for word in words:
            if word.startswith("--"):
                assert word in known, f"there is no {word} beside {' '.join(words)}"


@every_document
def test_options_that_stand_alone_are_somebodys(document: Path) -> None:
    pytest.importorskip("typer", reason="the extra cli is not installed")
    if document.name == "PROFILING.md":
        return  # mostly of NVIDIA's programs
    known = {
        name for bench in kvxfer_command().commands["bench"].commands for name in options(["bench", bench])
    }
    known |= FOREIGN | defined()
    for piece in code(document):
        if option := re.match(r"--[a-z][a-z-]+", piece):
            assert option[0] in known, f"nobody has {option[0]}"


@every_document
def test_targets_of_make_are_there(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    for kind in re.findall(r"^\$\(eval \$\(call NATIVE_TEST,(\w+),", makefile, re.MULTILINE):
        targets |= {f"native-build-{kind}", f"native-test-{kind}"}
    for piece in code(document):
        for line in piece.splitlines():
            if found := re.match(r"make ((?:\w+=\S+ )*)([a-z][\w-]*)", line):
                assert found[2] in targets, f"make {found[2]}: there is no such target"


@every_document
def test_variables_of_the_environment_are_read_somewhere(document: Path) -> None:
    for piece in code(document):
        for name in re.findall(r"\bKVXFER_\w+", piece):
            assert name in defined(), f"nobody reads {name}"


def test_each_variable_of_the_environment_is_in_the_table_and_set_by_a_test() -> None:
    read = {
        name
        for folder in ("kvxfer", "connectors")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'(?<!b)"(KVXFER_[A-Z_]+)"', path.read_text())
    }
    section = (ROOT / "docs/programming.md").read_text().partition("## Environment variables")[2]
    assert set(re.findall("`(KVXFER_[A-Z_]+)`", section)) == read
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert not {name for name in read if not re.search(rf"\b{name}\b", tests)}


@every_document
def test_public_names_are_there(document: Path) -> None:
    pytest.importorskip("kvxfer._native", reason="the native module is not built")
    kvxfer = importlib.import_module("kvxfer")
    for piece in code(document):
        for dotted in re.findall(r"(?<![\w./-])kvxfer((?:\.[A-Za-z_]\w*)+)", piece):
            found, path = kvxfer, "kvxfer"
            for name in dotted.strip(".").split("."):
                path += f".{name}"
                if path == "kvxfer.ranks":  # a key of the vLLM connector's parameters
                    break
                found = getattr(found, name, None) or importlib.import_module(path)
        for owner, name in re.findall(r"(?<![\w./-])(\w+)\.([a-z_]\w*)", piece):
            public = OBJECTS.get(owner, owner)
            if public in kvxfer.__all__ and f"{owner}.{name}" not in ("transfer.h", "trigger.h", "lease.h"):
                assert has(getattr(kvxfer, public), name), f"{owner}.{name}: {public} has no {name}"


def has(kind: type, name: str) -> bool:
    # What errors carry is set when they are made.
    errors = importlib.import_module("kvxfer.errors").KvxferError
    return hasattr(kind, name) or (issubclass(kind, errors) and f"\n{name} :" in str(inspect.getdoc(errors)))
