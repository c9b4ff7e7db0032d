"""The one rule for names of agents and regions, which control frames carry."""

from __future__ import annotations

from typing import Any, Final, TypeGuard

from kvxfer.errors import invalid

#: native/core/control/wire.h: kMaxName.
MAX_NAME_NBYTES: Final = 128


def is_name(value: object) -> TypeGuard[str]:
    """Whether `value` can name an agent or a region: text of 1 to 128 bytes in UTF-8.

    A lone surrogate has no UTF-8, so no frame could carry the name.
    """
    return is_text(value) and 0 < len(value.encode()) <= MAX_NAME_NBYTES


def is_text(value: object) -> TypeGuard[str]:
    """Whether `value` is text that UTF-8 can represent, as JSON and frames do."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def check_name(value: Any, what: str) -> str:
    """Returns a name.

    Raises
    ------
    UsageError
        ``invalid-argument``: ``"{what} must be ..."``.
    """
    if is_name(value):
        return value
    shown = ascii(value)[:200] if isinstance(value, str) else f"a {type(value).__name__}"
    raise invalid(f"{what} must be text of 1 to {MAX_NAME_NBYTES} bytes in UTF-8, not {shown}")
