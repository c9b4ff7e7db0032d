"""Functions that an engine calls before it loads its model, like installed plugins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.vllm.engine import ROOT


def plugin(register: Callable[[], None], folder: Path) -> dict[str, str]:
    """Returns the variables with which an engine calls ``register``; files of it go into ``folder``."""
    path = folder / "plugins"
    package = path / "kvxfer_tests-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: kvxfer-tests\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{register.__name__} = {register.__module__}:{register.__name__}\n"
    )
    return {"PYTHONPATH": os.pathsep.join((str(ROOT), str(path)))}
