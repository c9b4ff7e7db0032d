"""The ``--help`` of every command: values by name and not by type, examples, exit statuses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

EXIT_STATUSES = (
    "Exit status: 0: done. 1: it ran, but a check failed or the goal was not reached. "
    "2: it could not run as asked; one line says why and what to do. 130: interrupted."
)
# The unit of a value, by the end of the option's name.
_UNITS = {
    "s": "SECONDS",
    "ms": "MS",
    "us": "US",
    "kib": "KIB",
    "mib": "MIB",
    "gib": "GIB",
    "nbytes": "BYTES",
}


class Command(TyperCommand):
    """A command whose help names values."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns options and arguments, the option for help too."""
        return _named(super().get_params(ctx))


class Group(TyperGroup):
    """The same for a group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns options and arguments, the option for help too."""
        return _named(super().get_params(ctx))


def complete(app: typer.Typer) -> None:
    """Makes all commands of an app name values, and moves examples from docstrings behind the options.

    An example is a paragraph that begins with ``kvxfer``. A second call changes nothing.
    """
    app.info.cls = Group
    _complete_commands(app)
    if not isinstance(app.info.epilog, str):
        app.info.epilog = EXIT_STATUSES


def value_name(name: str) -> str:
    """Returns what the value of an option is called, e.g. ``"SECONDS"`` of ``timeout_s``."""
    last = name.rpartition("_")[2]
    return _UNITS.get(last, last.upper())


def is_unit(value: str) -> bool:
    """Whether a value's name says what it counts, as ``"MIB"`` does."""
    return value in _UNITS.values()


def _complete_commands(app: typer.Typer) -> None:
    for command in app.registered_commands:
        if command.cls in (None, TyperCommand):
            command.cls = Command
        words, examples = _parted(command.help or inspect.getdoc(command.callback) or "")
        command.help = words
        command.epilog = _epilog(command.epilog, examples)
    for group in app.registered_groups:
        group.cls = Group
        if group.typer_instance is not None:
            _complete_commands(group.typer_instance)
            told = group.typer_instance.info.epilog
            group.typer_instance.info.epilog = _epilog(told if isinstance(told, str) else None, [])


def _parted(text: str) -> tuple[str, list[str]]:
    """Returns a docstring without its examples, each paragraph on one line; and the examples."""
    words: list[str] = []
    examples: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        into = examples if paragraph.startswith("kvxfer ") else words
        into.append(" ".join(paragraph.split()))
    return "\n\n".join(words), examples


def _epilog(told: str | None, examples: Iterable[str]) -> str | None:
    parts = [*([told] if told else []), *examples]
    if parts and parts[0].startswith("kvxfer "):
        parts.insert(0, "Examples:")
    return "\n\n".join(parts) or None


def _named(params: list[Any]) -> list[Any]:
    for param in params:
        if param.param_type_name == "argument":
            # Its name names the value.
            param.display_type_rich = lambda ctx: None
        elif param.metavar is None:
            param.metavar = "" if param.is_flag else value_name(param.name)
    return params
