"""NIXL's numbers and errors.

Errors are NIXL's classes, so that ``except`` clauses work; their messages, ``code`` and cause are kvxfer's.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

from kvxfer.errors import KvxferError

T = TypeVar("T")


class _Number(IntEnum):
    """A named number of NIXL's, printed as NIXL prints it."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class nixl_mem_t(_Number):
    """Kinds of memory; kvxfer does not support files, blocks and objects."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(_Number):
    """The direction of a transfer."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_status_t(_Number):
    """The state of a call or a transfer."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class nixl_thread_sync_t(_Number):
    """How callers' threads share an agent. All threads may use a raw agent at once, whatever the setting."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


class nixl_cost_t(_Number):
    """The method by which a cost was estimated."""

    NIXL_COST_ANALYTICAL_BACKEND = 0


class NixlError(Exception):
    """The base of NIXL's errors. ``code`` is kvxfer's error code, or ``""``."""

    status = "NIXL_ERR_UNKNOWN"

    def __init__(self, message: str = "", code: str = "") -> None:
        super().__init__(f"{self.status}: {message}" if message else self.status)
        self.code = code


class nixlNotPostedError(NixlError):
    status = "NIXL_ERR_NOT_POSTED"


class nixlInvalidParamError(NixlError):
    status = "NIXL_ERR_INVALID_PARAM"


class nixlBackendError(NixlError):
    status = "NIXL_ERR_BACKEND"


class nixlNotFoundError(NixlError):
    status = "NIXL_ERR_NOT_FOUND"


class nixlMismatchError(NixlError):
    status = "NIXL_ERR_MISMATCH"


class nixlNotAllowedError(NixlError):
    status = "NIXL_ERR_NOT_ALLOWED"


class nixlRepostActiveError(NixlError):
    status = "NIXL_ERR_REPOST_ACTIVE"


class nixlUnknownError(NixlError):
    status = "NIXL_ERR_UNKNOWN"


class nixlNotSupportedError(NixlError):
    status = "NIXL_ERR_NOT_SUPPORTED"


class nixlRemoteDisconnectError(NixlError):
    status = "NIXL_ERR_REMOTE_DISCONNECT"


class nixlCancelledError(NixlError):
    status = "NIXL_ERR_CANCELED"


class nixlNoTelemetryError(NixlError):
    status = "NIXL_ERR_NO_TELEMETRY"


_ERROR_OF: dict[str, type[NixlError]] = {
    **dict.fromkeys(
        ("invalid-argument", "out-of-range", "duplicate-block", "length-mismatch", "layout-mismatch"),
        nixlInvalidParamError,
    ),
    **dict.fromkeys(("unknown-region", "region-gone"), nixlNotFoundError),
    **dict.fromkeys(("not-permitted", "lease-ended"), nixlNotAllowedError),
    **dict.fromkeys(
        ("peer-lost", "peer-silent", "peer-restarted", "auth-failed", "unreachable", "no-answer", "no-path"),
        nixlRemoteDisconnectError,
    ),
    "protocol": nixlMismatchError,
    "unsupported": nixlNotSupportedError,
    "refused": nixlRepostActiveError,
    "cancelled": nixlCancelledError,
}


def asked(call: Callable[[], T]) -> T:
    """Returns the result of a call to the raw agent; converts kvxfer's errors to NIXL's."""
    try:
        return call()
    except KvxferError as error:
        raise _ERROR_OF.get(error.code, nixlBackendError)(str(error), error.code) from error
