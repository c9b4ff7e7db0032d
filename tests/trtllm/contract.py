"""What TensorRT-LLM's connector interface promises, as it was read in its published source.

`contracts/` has a file for each module path of the interface in releases: classes and signatures (in the form
of `tests.engine_contract`), the names of the manager and of requests that are read, the calling threads, the
order of calls in an iteration of the loop, and what the loop does with a request. Each names the source files
that it was read from, and their commits.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.engine_contract import Contract

FOLDER: Final = Path(__file__).parent / "contracts"
#: The tests' names of the releases: the oldest path, and the one after it.
RELEASES: Final = {
    "older": "pyexecutor.kv_cache_connector",
    "newer": "pyexecutor.connectors.kv_cache_connector",
}


@dataclass(frozen=True, slots=True)
class Interface:
    """One of them.

    Attributes
    ----------
    module
        Where releases have it.
    classes, documented
        Their members; and those that only the engine's documentation has, at a later commit.
    manager, request
        Names of the engine's own that the connector reads or sets.
    threads
        The calling threads: ``"constructed"`` two threads at once, ``"main"`` the one that makes the
        executor, ``"loop"`` the executor's.
    iteration
        The calls of one iteration of the loop, each with a comma behind; those of layer groups as the flat.
    sequences
        What the loop does with a request, in the words of `tests.trtllm.replay`.
    """

    module: str
    classes: Contract
    documented: Contract
    manager: tuple[str, ...]
    request: tuple[str, ...]
    threads: dict[str, list[str]]
    iteration: re.Pattern[str]
    sequences: dict[str, list[str]]

    def thread_of(self, call: str) -> str:
        """Returns which thread makes a call."""
        (found,) = (thread for thread, calls in self.threads.items() if call in calls)
        return found


def interface(release: str) -> Interface:
    """Returns the recorded interface of a release (`RELEASES`)."""
    document: dict[str, Any] = json.loads((FOLDER / f"{RELEASES[release]}.json").read_text())
    words = document["iteration"]
    # A name stands for itself and a comma, with what makes it optional or repeated behind both.
    pattern = re.sub(r"([a-z][a-z_]+)", r"(?:\1,)", words).replace(" ", "")
    return Interface(
        document["module"],
        document["classes"],
        document.get("documented", {}),
        tuple(document["manager"]),
        tuple(document["request"]),
        document["threads"],
        re.compile(pattern),
        document["sequences"],
    )
