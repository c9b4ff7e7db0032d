"""The package's logger, ``logging.getLogger("kvxfer")``, imported when the first line is logged.

Importing ``logging`` takes a fifth of the time of importing all of kvxfer without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


def logger() -> logging.Logger:
    """Returns the logger."""
    import logging

    return logging.getLogger("kvxfer")


@contextmanager
def beside(error: BaseException | None, doing: str) -> Iterator[None]:
    """For the end of a ``with`` block: logs what fails, so that it does not hide the `error` of the block."""
    try:
        yield
    except Exception as also:
        if error is None:
            raise
        logger().warning("kvxfer: %s: %r", doing, also)


def is_debugging() -> bool:
    """Returns whether debug lines are shown; they are not in a process that has not imported ``logging``."""
    if "logging" not in sys.modules:
        return False
    import logging

    return logger().isEnabledFor(logging.DEBUG)
