"""The package's logger, ``logging.getLogger("kvxfer")``, imported when the first line is logged.

Importing ``logging`` takes a fifth of the time of importing all of kvxfer without it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


def logger() -> logging.Logger:
    """Returns the logger."""
    import logging

    return logging.getLogger("kvxfer")


def is_debugging() -> bool:
    """Returns whether debug lines are shown; they are not in a process that has not imported ``logging``."""
    if "logging" not in sys.modules:
        return False
    import logging

    return logger().isEnabledFor(logging.DEBUG)
