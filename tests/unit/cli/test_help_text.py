"""``--help`` of every command: values by name, examples that can be typed, and the exit statuses."""

from __future__ import annotations

import importlib
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("typer")

from kvxfer import cli  # where typer is

# What they show is too long for one example, or they have none yet.
WITHOUT_EXAMPLE = {"kvxfer", "kvxfer bench"}
PROGRAM = [sys.executable, "-P", "-m", "kvxfer"]


def commands() -> dict[str, Any]:
    """Returns every command by the words that call it."""
    build = importlib.import_module("kvxfer.cli.app").build
    root = importlib.import_module("typer.main").get_command(build())

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        yield name, command
        for each, under in getattr(command, "commands", {}).items():
            yield from walk(under, f"{name} {each}")

    return dict(walk(root, "kvxfer"))


COMMANDS = commands()
EXAMPLES = [
    line
    for command in COMMANDS.values()
    for line in (command.epilog or "").split("\n\n")
    if line.startswith("kvxfer ")
]


def of_terminal() -> dict[str, str]:
    """The environment without the variables that force or forbid colours."""
    asks = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "NO_COLOR", "COLUMNS")
    return {name: value for name, value in os.environ.items() if name not in asks} | {
        "TERM": "xterm-256color"
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_values_and_no_types(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main([*name.split()[1:], "--help"]) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"<(bool|str|int|float|path|list|.* range)\b", shown)
    if name not in WITHOUT_EXAMPLE:
        assert "Examples:" in shown
        assert f"\n {name}" in shown


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_have_options_that_are_there(example: str) -> None:
    words = shlex.split(example)
    name = max((each for each in COMMANDS if f"{example} ".startswith(f"{each} ")), key=len)
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    given = {word for word in words if word.startswith("--")}
    assert given <= known
    # A value follows each option that takes one.
    takes = {
        option: not getattr(parameter, "is_flag", False)
        for parameter in COMMANDS[name].params
        for option in parameter.opts
    }
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            assert takes[word] == (not following.startswith("--")), word


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["bench", "pages", "--help"],
        ["doctor", "--problems"],
        ["agents", "--daemon", "unix:/nowhere"],
    ],
    ids=" ".join,
)
def test_a_pipe_gets_no_colours(arguments: list[str]) -> None:
    done = subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False, env=of_terminal()
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--problems"]], ids=" ".join)
def test_a_terminal_gets_colours(arguments: list[str]) -> None:
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=of_terminal()
        ) as process:
            os.close(theirs)
            shown = b""
            try:
                while chunk := os.read(ours, 1 << 16):
                    shown += chunk
            except OSError:
                pass  # a terminal ends like this when its last process exits
            process.wait(60)
    finally:
        os.close(ours)
    assert b"\x1b[" in shown


@pytest.mark.parametrize("words", [["top"], ["serve"], ["bench", "router"]], ids=" ".join)
def test_a_command_starts_without_what_others_load(words: list[str]) -> None:
    program = f"import sys; from kvxfer.cli.app import build; build({words}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"numpy", "kvxfer._native", "fastapi", "kvxfer.cli.doctor"} & set(done.stdout.split())
