"""Exceptions, grouped by the largest thing lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A directory has up to 65,536 names, and a log line is read by people.
_MOST_LISTED: Final = 8
# native/include/kvxfer/status.h: the numbers and their words. A test compares them.
CODE_NAMES: Final[dict[int, str]] = {
    1: "again",
    10: "invalid-argument",
    11: "out-of-range",
    12: "duplicate-block",
    13: "length-mismatch",
    14: "layout-mismatch",
    15: "unknown-region",
    16: "unsupported",
    17: "exhausted",
    30: "not-permitted",
    31: "lease-ended",
    32: "region-gone",
    33: "cancelled",
    34: "deadline",
    35: "integrity",
    36: "refused",
    37: "no-path",
    50: "rail-failed",
    70: "peer-lost",
    71: "peer-silent",
    72: "peer-restarted",
    73: "auth-failed",
    74: "protocol",
    75: "unreachable",
    76: "no-answer",
    90: "closed",
    91: "forked",
    92: "system",
    93: "internal",
}


class KvxferError(Exception):
    """Base of kvxfer's errors. The message says what failed, where, and what to do next.

    docs/errors.md has every code: its class, what happened, what to do, and which verbs raise it.

    Attributes
    ----------
    code : str
        One word for programs, e.g. ``"lease-ended"`` (native/include/kvxfer/status.h).
    peer : str
        Name of the peer concerned, or ``""``.
    rail : str
        Transports that carried the work, e.g. ``"shm"`` or ``"tcp,tcp"``, or ``""``.
    context : str
        The request concerned: the ``context`` of the transfer or expectation that failed, or ``""``.
    failed_blocks : numpy.ndarray
        This end's block ids (uint32). At the destination their bytes cannot be relied on; at the source they
        are intact, and may not have arrived. Every error that ended a transfer carries them, whatever its
        class; empty for all others.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        peer: str = "",
        rail: str = "",
        context: str = "",
        failed_blocks: NDArray[np.uint32] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.peer = peer
        self.rail = rail
        self.context = context
        self._failed_blocks = failed_blocks

    @property
    def failed_blocks(self) -> NDArray[np.uint32]:
        """The blocks that the error names; see the class."""
        if self._failed_blocks is None:
            # Takes a tenth of a second, which programs that move nothing never need; and is impossible while
            # the interpreter ends, when agents are closed, too.
            import numpy as np

            self._failed_blocks = np.empty(0, np.uint32)
        return self._failed_blocks

    def __str__(self) -> str:
        named = (("peer", self.peer), ("rail", self.rail), ("context", self.context))
        # Any of them may hold line breaks, which would split a log line, or what is no UTF-8.
        shown = ((label, value if value.isprintable() else ascii(value)) for label, value in named if value)
        where = ", ".join(f"{label} {value}" for label, value in shown)
        return f"{self.args[0]} [{self.code}{', ' + where if where else ''}]"

    def __reduce__(self) -> tuple[object, ...]:
        # An error must survive pickling, e.g. in an engine's process pool; keyword-only arguments would not.
        named = self.peer, self.rail, self.context
        return _rebuild, (type(self), self.args[0], self.code, *named, self._failed_blocks)


def _rebuild(
    cls: type[KvxferError],
    message: str,
    code: str,
    peer: str,
    rail: str,
    context: str,
    failed: NDArray[np.uint32] | None,
) -> KvxferError:
    return cls(message, code=code, peer=peer, rail=rail, context=context, failed_blocks=failed)


class UsageError(KvxferError):
    """The caller's mistake; nothing was posted and nothing changed. Do not retry unchanged."""


def invalid(message: str, *, peer: str = "") -> UsageError:
    """Returns the error for an argument of the wrong kind or size; the message names the argument."""
    return UsageError(message, code="invalid-argument", peer=peer)


def listed(names: Iterable[str], none: str, between: str = ", ") -> str:
    """Returns the first names of many for a message, and how many there are beyond them; `none` if none."""
    known = sorted(names)
    rest = len(known) - _MOST_LISTED
    return between.join(known[:_MOST_LISTED]) + (f" and {rest} more" if rest > 0 else "") or none


class ExhaustedError(UsageError):
    """A bounded resource (pool, slots, queue) is used up; the same call may succeed later."""


class TransferError(KvxferError):
    """One transfer is lost; retry it, or recompute ``failed_blocks``. The peer is still there."""


class RailError(KvxferError):
    """The rails that could carry the transfer are lost. They are dialled again; retry later.

    Nothing was posted.
    """


class PeerError(KvxferError):
    """The peer is lost, with every transfer and lease of its session. Recompute, or connect again."""


class NoAnswerError(PeerError, TimeoutError):
    """The time for a session, or for a directory's answer, was over (``no-answer``)."""


class AgentError(KvxferError):
    """The agent is lost (closed, forked, or broken); make a new one."""


_OF_ONE_CODE: Final = {17: ExhaustedError, 76: NoAnswerError}
# By the size of what is lost.
_BY_LOSS: Final = (UsageError, TransferError, RailError, PeerError, AgentError)


def largest_loss(errors: Iterable[KvxferError]) -> KvxferError:
    """Returns the error with the largest loss, the first one among equals; there must be at least one."""
    return max(errors, key=lambda error: [isinstance(error, cls) for cls in reversed(_BY_LOSS)])


def class_of(code: int) -> type[KvxferError]:
    """Returns the class for a native code. Each group of status.h has ten or twenty codes."""
    if code in _OF_ONE_CODE:
        return _OF_ONE_CODE[code]
    # "again" reaches a caller only if the layers below did not absorb a full queue. Nothing was posted.
    for bound, cls in ((30, UsageError), (50, TransferError), (70, RailError), (90, PeerError)):
        if code < bound:
            return cls
    return AgentError


def translate(
    error: BaseException,
    *,
    peer: str = "",
    rail: str = "",
    context: str = "",
    failed_blocks: NDArray[np.uint32] | None = None,
) -> KvxferError:
    """Makes the public exception for a ``NativeError(code, message)``.

    Any other exception becomes ``AgentError("internal")``: an unknown failure must not look safe to retry.
    """
    args = error.args
    if len(args) == 2 and isinstance(args[0], int):
        return from_code(
            args[0], str(args[1]), peer=peer, rail=rail, context=context, failed_blocks=failed_blocks
        )
    return AgentError(
        f"unexpected {type(error).__name__}: {error}", code="internal", peer=peer, rail=rail, context=context
    )


def from_code(
    code: int,
    message: str,
    *,
    peer: str = "",
    rail: str = "",
    context: str = "",
    failed_blocks: NDArray[np.uint32] | None = None,
) -> KvxferError:
    """Makes the public exception for a native code and its message."""
    name = CODE_NAMES.get(code, f"code-{code}")
    return class_of(code)(
        message or name, code=name, peer=peer, rail=rail, context=context, failed_blocks=failed_blocks
    )
