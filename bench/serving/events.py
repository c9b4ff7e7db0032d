"""Reads from observers' files what the two halves of a connector did for each request.

`kvxfer.bench.serving.observer` writes them from within the engines.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

#: Names the folder into which observers write.
FOLDER_VARIABLE: Final = "KVXFER_SERVING_OBSERVED"

#: In the order of a pull. ``finished`` is seen at prefill, the others at decode. With SGLang prefill has
#: ``computed`` a prompt, and decode ``found`` its cache.
Event = Literal["finished", "asked", "allocated", "ordered", "loaded", "computed", "found"]
COSTS: Final = "costs"
# It is complete when the last worker has it.
_LAST_COUNTS: Final = ("loaded", "found")


@dataclass(slots=True)
class Seen:
    """One request: the first time of each of its events, and how long the connector's calls took.

    An event that never came is missing. ``failed``: the load failed.
    """

    at_ns: dict[str, int] = field(default_factory=dict)
    took_ns: dict[str, int] = field(default_factory=dict)
    failed: bool = False


#: ``steps`` of the engine, and ``total_ns`` that a half of a connector took from its loop in all its methods.
Costs = Counter[str]


def us_per_step(costs: Costs) -> float:
    """Returns microseconds for each step of the engine; 0 if there was no step."""
    return costs["total_ns"] / 1e3 / costs["steps"] if costs["steps"] else 0.0


class Observations:
    """What a deployment's observers have written. It is read again as they write more.

    ``folder`` has a folder for each engine, by its role; no two of them see the same event of a request.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[dict[str, Any]] = []
        self._costs: dict[Path, tuple[str, Costs]] = {}

    def read(self) -> None:
        """Reads what is there. Leaves a line that is still being written for the next call."""
        self._lines.clear()
        for path in sorted(self._folder.glob("*/*.jsonl")):
            whole, _, _ = path.read_bytes().rpartition(b"\n")
            for line in whole.splitlines():
                self._take(path, json.loads(line))

    def _take(self, path: Path, line: dict[str, Any]) -> None:
        if line["event"] == COSTS:
            self._costs[path] = line["half"], Counter(steps=line["steps"], total_ns=line["total_ns"])
        else:
            self._lines.append(line)

    def requests(self, names: Iterable[str]) -> dict[str, Seen]:
        """Returns what happened to each request, by the name that its client gave it.

        An engine adds text before and behind the client's name; this looks for the name within.
        """
        found = {name: Seen() for name in names}
        for line in self._lines:
            name = next((name for name in found if name in line["request"]), None)
            if name is None:
                continue
            seen = found[name]
            event = line["event"]
            # With tensor parallelism every worker reports this.
            if event not in seen.at_ns or event in _LAST_COUNTS:
                seen.at_ns[event] = line["at_ns"]
                seen.took_ns[event] = line.get("took_ns", 0)
            seen.failed = seen.failed or bool(line.get("failed"))
        return found

    def costs(self) -> dict[str, dict[str, Costs]]:
        """Returns by role the time of each half, ``scheduler`` and ``worker``, so far; sums all workers."""
        found: dict[str, dict[str, Costs]] = {}
        for path, (half, costs) in self._costs.items():
            halves = found.setdefault(path.parent.name, {"scheduler": Costs(), "worker": Costs()})
            halves[half] += costs
        return found
