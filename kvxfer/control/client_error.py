"""What a client raises: an answer of the daemon's that is a problem, or that there was none."""

from __future__ import annotations

import json

from kvxfer.errors import KvxferError

#: No answer came: nothing listens there, or the connection ended.
UNREACHABLE = "unreachable"


class ControlError(KvxferError):
    """The daemon refused or failed, or could not be asked.

    Attributes
    ----------
    code
        One word for programs: of docs/errors.md, or of the daemon's own (docs/daemon.md). ``unreachable``:
        it did not answer; ``deadline``: not in time.
    title
        Its kind in words.
    detail
        What happened, for people.
    status
        Of HTTP; 0 where no answer came.
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
        """Returns the error that an answer stands for; also of one that a proxy gave."""
        try:
            told = json.loads(body)
            return cls(str(told["code"]), str(told["title"]), str(told["detail"]), status)
        except (ValueError, KeyError, TypeError):
            words = body[:200].decode("utf-8", "replace").strip()
            return cls("protocol", "This is no daemon's answer", f"status {status}: {words}", status)
