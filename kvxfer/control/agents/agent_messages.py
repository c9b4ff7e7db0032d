"""Messages of agents, read as untrusted input: types and bounds are checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvxfer.daemon_link.frames import VERSION, Malformed
from kvxfer.naming import is_name

_MOST_ROWS: Final = 1024
_MAX_WORD: Final = 512
_MOST_COUNTS: Final = 16
_MAX_OPTIONS_NBYTES: Final = 16 << 10
_MAX_INTEGER: Final = 1 << 64


class Hello(NamedTuple):
    """An agent's first message."""

    name: str
    incarnation: str
    address: str
    host: str
    version: str
    may: tuple[str, ...]
    options: dict[str, Any]


def hello_of(message: Mapping[str, Any]) -> Hello:
    """Reads a hello; raises `Malformed` if it is malformed, or has another version."""
    if message.get("v") != VERSION:
        raise Malformed(f"it speaks version {str(message.get('v'))[:20]}, but this daemon speaks {VERSION}")
    incarnation = _incarnation(message.get("incarnation"))
    name = _word(message.get("name"))
    if not is_name(name):
        raise Malformed("its name is empty, too long, or not UTF-8")
    options = message.get("options")
    if not isinstance(options, dict) or len(json.dumps(options)) > _MAX_OPTIONS_NBYTES:
        raise Malformed("its options are not an object, or too large")
    return Hello(
        name=name,
        incarnation=incarnation,
        address=_word(message.get("address")),
        host=_word(message.get("host")),
        version=_word(message.get("version")),
        may=tuple(_words(message.get("may"))),
        options=options,
    )


def sections_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Attached` that a message sets, checked; raises `Malformed`."""
    found = {name: read(message[name]) for name, read in _SECTIONS.items() if name in message}
    if "unix_ns" in message and "monotonic_ns" in message:
        found["clock_offset_ns"] = _integer(message["unix_ns"]) - _integer(message["monotonic_ns"])
    if "stats" in found:
        found["records_dropped"] = found["stats"]["records_dropped"]
    return found


def peer_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the session in an agent's answer, checked; raises `Malformed`."""
    (row,) = _SECTIONS["peers"]([answer.get("peer")])
    return dict(row)


Reader = Callable[[Any], Any]


def _incarnation(value: object) -> str:
    word = _word(value)
    if len(word) != 32 or not set(word) <= set("0123456789abcdef"):
        raise Malformed("an incarnation is not 32 hexadecimal digits")
    return word


def _word(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_WORD:
        raise Malformed("a value is not a text, or too long")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed("a text contains half a character") from None
    return value


def _words(value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > _MOST_ROWS:
        raise Malformed("a value is not a list of texts, or too long")
    return [_word(each) for each in value]


def _integers(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) > _MOST_ROWS:
        raise Malformed("a value is not a list of numbers, or too long")
    return [_integer(each) for each in value]


def _integer(value: Any) -> int:
    if type(value) is not int or not -_MAX_INTEGER < value < _MAX_INTEGER:
        raise Malformed("a value is not a whole number, or too large")
    return value


def _number_or_none(value: Any) -> float | None:
    if value is not None and type(value) not in (int, float):
        raise Malformed("a value is not a number")
    return value  # type: ignore[no-any-return]


def _integer_or_none(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _counts(value: Any) -> dict[str, int]:
    told = _object(value)
    if len(told) > _MOST_COUNTS:
        raise Malformed("there are too many counts")
    return {_word(name): _integer(count) for name, count in told.items()}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Malformed("a value is not true or false")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed("a value is not an object")
    return value


def _stats(value: Any) -> dict[str, Any]:
    """Reads an agent's counters; those that the daemon counts with are numbers."""
    told = _object(value)
    for name in ("records_dropped", "transfers_open"):
        _integer(told.setdefault(name, 0))
    return told


def _object_or_none(value: Any) -> dict[str, Any] | None:
    return None if value is None else _object(value)


def _rows(fields: Mapping[str, Reader]) -> Reader:
    def read(value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list) or len(value) > _MOST_ROWS:
            raise Malformed("a value is not a list, or too long")
        rows = []
        for row in value:
            if not isinstance(row, dict) or fields.keys() - row.keys():
                raise Malformed("a row is not an object, or lacks fields")
            rows.append({name: one(row[name]) for name, one in fields.items()})
        return rows

    return read


_SECTIONS: Final[dict[str, Reader]] = {
    "regions": _rows(
        {
            "id": _integer,
            "name": _word,
            "kind": _word,
            "num_blocks": _integer,
            "nbytes": _integer,
            "layout": _object_or_none,
            "notes": _words,
        }
    ),
    "peers": _rows(
        {
            "session": _integer,
            "name": _word,
            "incarnation": _incarnation,
            "address": _word,
            "is_ours": _flag,
            "rails": _words,
            "paths": _words,
            "notes": _words,
            "regions": _words,
            "region_ids": _integers,
            "num_regions": _integer,
        }
    ),
    "leases": _rows(
        {
            "lease": _word,
            "holder": _word,
            "peer": _integer_or_none,
            "region": _integer,
            "mode": _word,
            "num_blocks": _integer_or_none,
            "state": _word,
            "seconds_left": _number_or_none,
        }
    ),
    "rails_off": _words,
    "limits": _rows({"name": _word, "max_bytes_per_s": _integer, "least_priority": _integer}),
    "stats": _stats,
    "draining": _flag,
    "draining_until_ns": _integer_or_none,
    "num_regions": _integer,
    "num_peers": _integer,
    "num_leases": _integer,
    "leases_ended": _counts,
}
