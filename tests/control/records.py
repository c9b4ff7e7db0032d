"""Records as agents report them."""

from __future__ import annotations

from typing import Any

from kvxfer.control.agents.attached import Attached
from kvxfer.session.records import Record


def record(**more: Any) -> Record:
    """Returns a record of a completed read, with the named fields changed."""
    plain: dict[str, Any] = {
        "session": 1,
        "transfer": 1,
        "handle": 1,
        "ours": True,
        "role": "source",
        "region": 1,
        "remote_region": 2,
        "outcome": "done",
        "code": "",
        "state": "done",
        "priority": 0,
        "num_blocks": 4,
        "num_layers": 2,
        "num_pieces": 1,
        "pieces_done": 1,
        "nbytes": 4096,
        "posted_ns": 0,
        "begun_ns": 0,
        "first_piece_ns": 0,
        "ended_ns": 0,
        "rails": ("shm",),
        "context": "",
        "message": "",
    }
    return Record(**{**plain, **more})


def attached(incarnation: str, name: str, **more: Any) -> Attached:
    """Returns an agent as it reported itself."""
    plain: dict[str, Any] = {
        "address": "tcp://127.0.0.1:1",
        "pid": 1,
        "uid": 0,
        "host": "here",
        "version": "0",
        "may": ("show",),
        "options": {},
        "attached_at": 1.0,
    }
    return Attached(name=name, incarnation=incarnation, **{**plain, **more})
