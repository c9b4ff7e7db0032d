"""Transfers as /v1 shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from kvxfer.control import schema
from kvxfer.control.state.transfer_table import END_NAMES, End, Entry, Made
from kvxfer.session.records import Record

_LOST: Final = "its end was not reported: its agent has gone, or its record was lost"
# Shown for a transfer until one of its ends is reported.
_UNKNOWN: Final = {"code": "", "message": "", "num_layers": 0, "nbytes": 0}


class TransferView:
    """Shows transfers; a list of 500 with both ends takes some 10 ms.

    Parameters
    ----------
    region_name
        Returns the name of an agent's region.
    """

    def __init__(self, region_name: Callable[[str, int], str]) -> None:
        self._region_name = region_name

    def one(self, entry: Entry) -> schema.Transfer:
        """Returns a transfer with both ends."""
        return schema.Transfer.model_validate(self._entry(entry, {}))

    def page(self, entries: Iterable[Entry], cursor: str | None) -> schema.Listed[schema.Transfer]:
        """Returns a page of a list."""
        names: dict[tuple[str, int], str] = {}
        items = [self._entry(entry, names) for entry in entries]
        return schema.Listed[schema.Transfer].model_validate({"items": items, "next": cursor})

    def open(
        self, told: Iterable[tuple[str, End, Made | None]], now_s: float, limit: int
    ) -> schema.Listed[schema.Transfer]:
        """Returns transfers that agents report as open: their ids, one end each, and who made them."""
        found: dict[str, dict[str, Any]] = {}
        names: dict[tuple[str, int], str] = {}
        for id_, end, made in told:
            shown = found.get(id_)
            if shown is None:
                row = (id_, 0, end.record.context, "pending", now_s, None, None, None)
                shown = found[id_] = self._entry(Entry(row, made), names)
                shown |= _of_record(end.record)
            shown[end.record.role] = self._end(end, names)
        items = list(found.values())[:limit]
        return schema.Listed[schema.Transfer].model_validate({"items": items, "next": None})

    def _entry(self, entry: Entry, names: dict[tuple[str, int], str]) -> dict[str, Any]:
        made = entry.made
        shown: dict[str, Any] = {
            "id": entry.id,
            "made_id": None if made is None else made.id,
            "state": entry.outcome,
            "context": entry.context,
            "trace_parent": entry.trace_parent,
            "tenant": entry.tenant,
            "created_by": None if made is None else made.by,
            "updated_at_s": entry.updated_at_s,
        }
        told: End | None = None
        for name in END_NAMES:
            end = entry.end(name)
            shown[name] = None if end is None else self._end(end, names)
            if end is not None and (told is None or name == "destination"):
                told = end
        if told is not None:
            return shown | _of_record(told.record)
        shown |= _UNKNOWN
        shown["priority"] = 0 if made is None else made.priority
        shown["num_blocks"] = 0 if made is None else made.num_blocks
        if entry.outcome == "failed":
            shown |= {"code": "gone", "message": _LOST}
        return shown

    def _end(self, end: End, names: dict[tuple[str, int], str]) -> dict[str, Any]:
        record = end.record
        posted = record.posted_ns
        place = (end.agent, record.region)
        # The record may have arrived before its region was reported.
        if not (name := end.region_name) and (name := names.get(place, "")) == "":
            name = names[place] = self._region_name(*place)
        return {
            "agent": end.agent,
            "agent_name": end.agent_name,
            "began_it": record.ours,
            "region": record.region,
            "region_name": name,
            "peer": end.peer,
            "peer_name": end.peer_name,
            "remote_region": record.remote_region,
            "remote_region_name": end.remote_region_name,
            "outcome": record.outcome,
            "state": record.state,
            "code": record.code,
            "message": record.message,
            "rails": list(record.rails),
            "num_blocks": record.num_blocks,
            "num_layers": record.num_layers,
            "nbytes": record.nbytes,
            "nbytes_done": record.nbytes_done,
            "posted_at_s": (posted + end.clock_offset_ns) / 1e9 if posted else 0.0,
            "begun_after_us": _after_us(posted, record.begun_ns),
            "first_piece_after_us": _after_us(posted, record.first_piece_ns),
            "ended_after_us": _after_us(posted, record.ended_ns),
        }


def _of_record(record: Record) -> dict[str, Any]:
    return {
        "code": record.code,
        "message": record.message,
        "priority": record.priority,
        "num_blocks": record.num_blocks,
        "num_layers": record.num_layers,
        "nbytes": record.nbytes,
    }


def _after_us(posted_ns: int, at_ns: int) -> float | None:
    return (at_ns - posted_ns) / 1e3 if at_ns and posted_ns else None
