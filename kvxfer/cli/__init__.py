"""The ``kvxfer`` command. Its libraries are the extra ``cli``; the core never imports them."""

from __future__ import annotations

import importlib.util
import sys

_NEEDED = ("typer", "rich", "psutil")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"kvxfer: the command line needs {' and '.join(missing)}: pip install 'kvxfer[cli]'",
            file=sys.stderr,
        )
        return 2
    from kvxfer.cli.app import run

    return run(arguments)
