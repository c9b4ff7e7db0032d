"""What can go wrong, grouped by the largest thing lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# native/include/kvxfer/status.h: the numbers and their words. Held to it by a test.
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
    90: "closed",
    91: "forked",
    92: "system",
    93: "internal",
}


class KvxferError(Exception):
    """Something that kvxfer could not do; the message says what, where and what to do next.

    docs/errors.md has every code: its class, what happened, what to do, and which verbs raise it.

    Attributes
    ----------
    code : str
        One word for programs, e.g. ``"lease-ended"`` (native/include/kvxfer/status.h).
    peer : str
        Name of the peer that it concerns, or ``""``.
    rail : str
        Transports that the work was on, e.g. ``"shm"`` or ``"tcp,tcp"``, or ``""``.
    context : str
        Whose request it concerns: the ``context`` of the transfer or expectation that failed, or ``""``.
    failed_blocks : numpy.ndarray
        This end's block ids (uint32) whose bytes cannot be relied on. Every error that ended a
        transfer carries them, whatever its class; empty for all others.
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
        if failed_blocks is None:
            import numpy as np  # which takes a tenth of a second, and programs that move nothing lack

            failed_blocks = np.empty(0, np.uint32)
        self.failed_blocks = failed_blocks

    def __str__(self) -> str:
        # A peer's context may hold what would break a line of a log.
        context = self.context if self.context.isprintable() else ascii(self.context)
        named = (("peer", self.peer), ("rail", self.rail), ("context", context))
        where = ", ".join(f"{label} {value}" for label, value in named if value)
        return f"{self.args[0]} [{self.code}{', ' + where if where else ''}]"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments: an error must survive a process pool of the engine.
        named = self.peer, self.rail, self.context
        return _rebuild, (type(self), self.args[0], self.code, *named, self.failed_blocks)


def _rebuild(
    cls: type[KvxferError],
    message: str,
    code: str,
    peer: str,
    rail: str,
    context: str,
    failed: NDArray[np.uint32],
) -> KvxferError:
    return cls(message, code=code, peer=peer, rail=rail, context=context, failed_blocks=failed)


class UsageError(KvxferError):
    """The caller's mistake; nothing was posted and nothing changed. Do not retry unchanged."""


def invalid(message: str, *, peer: str = "") -> UsageError:
    """Returns the error of an argument of the wrong kind or size; the message names it."""
    return UsageError(message, code="invalid-argument", peer=peer)


class ExhaustedError(UsageError):
    """A bounded resource (pool, slots, queue) is used up; the same call may succeed later."""


class TransferError(KvxferError):
    """One transfer is lost; retry it, or recompute ``failed_blocks``. The peer is still there."""


class RailError(KvxferError):
    """The rails that could bring it are lost and dialled again; nothing was posted. Post it again later."""


class PeerError(KvxferError):
    """The peer is lost, with every transfer and lease of its session. Recompute, or reconnect."""


class AgentError(KvxferError):
    """The agent is lost (closed, forked, or broken); make a new one."""


# By the size of what is lost.
_BY_LOSS: Final = (UsageError, TransferError, RailError, PeerError, AgentError)


def largest_loss(errors: Iterable[KvxferError]) -> KvxferError:
    """Returns the error that names the largest thing lost, the first of those of one class; one at least."""
    return max(errors, key=lambda error: [isinstance(error, cls) for cls in reversed(_BY_LOSS)])


def class_of(code: int) -> type[KvxferError]:
    """Returns the class for a native code: the groups of status.h, a decade or two each."""
    if code == 17:
        return ExhaustedError
    # "again" reaches a caller only where a full queue was not absorbed below: nothing was posted.
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
    """Makes the public exception of a ``NativeError(code, message)``.

    Anything else becomes ``AgentError("internal")``: an unknown failure must not look like one
    that is safe to retry.
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
    """Makes the public exception of a native code and its words."""
    name = CODE_NAMES.get(code, f"code-{code}")
    return class_of(code)(
        message or name, code=name, peer=peer, rail=rail, context=context, failed_blocks=failed_blocks
    )
