"""JSON objects from elsewhere: bounded, and exactly the fields that were asked for."""

from __future__ import annotations

import json
from typing import Any

from kvxfer.errors import UsageError


def decode_object(encoded: bytes, max_nbytes: int, what: str) -> dict[str, Any]:
    """Reads one JSON object with distinct keys.

    Raises
    ------
    UsageError
        ``invalid-argument``: longer than `max_nbytes`, no JSON, no object, or a key given twice.
    """
    if len(encoded) > max_nbytes:
        raise _bad(f"{what} of {len(encoded)} bytes is over the bound of {max_nbytes}")

    def distinct(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) != len(items):
            raise _bad(f"{what} names a field twice")
        return values

    try:
        values = json.loads(encoded, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and bad UTF-8 are ValueErrors
        raise _bad(f"{what} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise _bad(f"{what} is a JSON {type(values).__name__}, not an object")
    return values


def require_fields(values: dict[str, Any], names: tuple[str, ...], what: str) -> None:
    """Raises ``UsageError("invalid-argument")`` unless the keys are exactly `names`."""
    missing = [name for name in names if name not in values]
    unknown = [name for name in values if name not in names]
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown {', '.join(unknown[:8])[:200]}"] if unknown else []
        raise _bad(f"{what} {' and '.join(parts)}")


def _bad(message: str) -> UsageError:
    return UsageError(message, code="invalid-argument")
