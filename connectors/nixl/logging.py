"""Loggers under ``nixl``, as NIXL's clients ask for them."""

from __future__ import annotations

import logging
import os

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


def set_log_level_by_env(nixl_logger: logging.Logger) -> None:
    """Sets the level that ``NIXL_LOG_LEVEL`` names."""
    wanted = os.environ.get("NIXL_LOG_LEVEL", "")
    if wanted.upper() in _LEVELS:
        nixl_logger.setLevel(_LEVELS[wanted.upper()])
    elif wanted:
        nixl_logger.warning("NIXL_LOG_LEVEL=%s is not one of %s", wanted, ", ".join(_LEVELS))


def setup_logging() -> None:
    """Sets the level; the program itself decides where messages go."""
    set_log_level_by_env(logging.getLogger("nixl"))


def get_logger(name: str) -> logging.Logger:
    """Returns ``nixl.NAME``, without leading underscores."""
    setup_logging()
    return logging.getLogger(f"nixl.{name.lstrip('_')}")
