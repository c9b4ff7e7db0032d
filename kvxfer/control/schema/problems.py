"""Refusals of requests: a stable code, its HTTP status, and an explanation."""

from __future__ import annotations

from typing import Final

#: The daemon's own codes, in addition to those of docs/errors.md; docs/daemon.md explains them.
STATUSES: Final = {
    "unauthorized": 401,
    "forbidden": 403,
    "not-permitted": 403,
    "not-found": 404,
    "unknown-region": 404,
    "method-not-allowed": 405,
    "conflict": 409,
    "again": 409,
    "lease-ended": 409,
    "region-gone": 409,
    "cancelled": 409,
    "closed": 409,
    "gone": 410,
    "too-large": 413,
    "unsupported-media-type": 415,
    "invalid-argument": 422,
    "out-of-range": 409,
    "duplicate-block": 409,
    "length-mismatch": 409,
    "layout-mismatch": 409,
    "unsupported": 409,
    "rate-limited": 429,
    "exhausted": 429,
    "internal": 500,
    "integrity": 502,
    "refused": 502,
    "no-path": 502,
    "rail-failed": 502,
    "peer-lost": 502,
    "peer-silent": 502,
    "peer-restarted": 502,
    "auth-failed": 502,
    "protocol": 502,
    "unreachable": 502,
    "unavailable": 503,
    "draining": 503,
    "no-answer": 504,
    "deadline": 504,
}

TITLES: Final = {
    400: "The request cannot be read",
    401: "The caller is not known",
    403: "Not allowed",
    404: "Not found",
    405: "Not a method of this path",
    409: "In conflict with the current state",
    410: "It no longer exists",
    413: "Too large",
    415: "Not JSON",
    422: "The request is wrong",
    429: "Too much at a time",
    500: "An error of the daemon",
    502: "The agent or its peer failed",
    503: "Not available now",
    504: "No answer in time",
}


class Refusal(Exception):  # noqa: N818  # an answer, and often no error of the daemon's
    """Ends a request with a problem.

    Attributes
    ----------
    code
        One of `STATUSES`, or a code of an agent, which is answered as 502.
    detail
        What happened, for people.
    retry_after_s
        After how many seconds to ask again, if known.
    status
        The HTTP status.
    """

    def __init__(
        self, code: str, detail: str, *, retry_after_s: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(f"{detail} [{code}]")
        self.status = STATUSES.get(code, 502) if status is None else status
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s
