"""The package's logger, ``logging.getLogger("kvxfer")``, imported with the first line that is logged.

``logging`` costs a fifth of what importing all of kvxfer costs without it.
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
    """Whether anybody would see a debug line: nobody who has not imported ``logging`` would."""
    if "logging" not in sys.modules:
        return False
    import logging

    return logger().isEnabledFor(logging.DEBUG)
