"""Loggers under ``nixl``, as NIXL's clients ask for them."""

from __future__ import annotations

import logging
import os
import sys

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
    "CRITICAL": logging.CRITICAL,
}
_FORMAT = "%(asctime)s NIXL %(levelname)-7s %(filename)s:%(lineno)d %(message)s"
_is_set_up = False


def set_log_level_by_env(nixl_logger: logging.Logger) -> None:
    """Sets the level that ``NIXL_LOG_LEVEL`` names."""
    wanted = os.environ.get("NIXL_LOG_LEVEL", "")
    if wanted.upper() in _LEVELS:
        nixl_logger.setLevel(_LEVELS[wanted.upper()])
    elif wanted:
        nixl_logger.warning("NIXL_LOG_LEVEL=%s is not one of %s", wanted, ", ".join(_LEVELS))


def setup_logging() -> None:
    """Prints ``nixl``'s messages from INFO on, as NIXL does, unless the program has decided that itself."""
    global _is_set_up
    if _is_set_up:
        return
    _is_set_up = True
    nixl = logging.getLogger("nixl")
    if not nixl.hasHandlers():
        printing = logging.StreamHandler(sys.stdout)
        printing.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
        nixl.addHandler(printing)
        nixl.propagate = False  # or a handler that the program adds to the root later prints them again
    if nixl.level == logging.NOTSET:
        nixl.setLevel(logging.INFO)
    set_log_level_by_env(nixl)


def get_logger(name: str) -> logging.Logger:
    """Returns ``nixl.NAME``, without leading underscores."""
    setup_logging()
    return logging.getLogger(f"nixl.{name.lstrip('_')}")
