"""A request's way as a trace file for https://ui.perfetto.dev: Chrome's JSON format, in microseconds.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvxfer.control import schema


def perfetto_of(rows: Iterable[schema.TraceRow]) -> dict[str, Any]:
    """Returns the file: a process for each agent, engine and router, with a track for each transfer in it.

    Times count from the first row, because microseconds since 1970 would lose shorter durations.
    """
    rows = sorted(rows, key=lambda row: (row.started_at_s, row.depth))
    first_s = rows[0].started_at_s if rows else 0.0
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for row in rows:
        if row.process not in processes:
            processes[row.process] = len(processes) + 1
            events.append(_named("process_name", processes[row.process], 0, row.process))
        track = (row.process, row.lane)
        if track not in tracks:
            tracks[track] = len(tracks) + 1
            events.append(_named("thread_name", processes[row.process], tracks[track], row.lane))
        events.append(
            {
                "ph": "X",
                "cat": "kvxfer",
                "name": row.name,
                "pid": processes[row.process],
                "tid": tracks[track],
                "ts": round((row.started_at_s - first_s) * 1e6, 3),
                "dur": round(row.took_us, 3),
                "args": {**row.details, **({"error": row.error} if row.error else {})},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_at_s": first_s}}


def _named(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}
