"""The error of a client: the daemon answered with a problem, or did not answer."""

from __future__ import annotations

import json

from kvxfer.errors import KvxferError

#: No answer: nothing listens at that place, or the connection ended.
UNREACHABLE = "unreachable"


class ControlError(KvxferError):
    """The daemon refused or failed a call, or could not be reached.

    Attributes
    ----------
    code
        One word for programs: of docs/errors.md, or one of the daemon's own (docs/daemon.md).
        ``unreachable``: the daemon did not answer. ``deadline``: it did not answer in time.
    title
        The kind of error, in words.
    detail
        What happened, for people.
    status
        The HTTP status; 0 if there was no answer.
    """

    def __init__(self, code: str, title: str, detail: str, status: int) -> None:
        super().__init__(detail or title, code=code)
        self.title = title
        self.detail = detail
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return ControlError, (self.code, self.title, self.detail, self.status)

    @classmethod
    def of_answer(cls, status: int, body: bytes) -> ControlError:
        """Returns the error for an answer, which may also come from a proxy."""
        try:
            told = json.loads(body)
            return cls(str(told["code"]), str(told["title"]), str(told["detail"]), status)
        except (ValueError, KeyError, TypeError):
            words = body[:200].decode("utf-8", "replace").strip()
            return cls("protocol", "This is not a daemon's answer", f"status {status}: {words}", status)
