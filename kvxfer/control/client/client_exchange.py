"""The course of one call: when it is sent again, and its result. Without I/O, for both clients."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, TypeVar

import httpx

from kvxfer.control.client.client_calls import Call
from kvxfer.control.client.client_error import UNREACHABLE, ControlError

Answer = TypeVar("Answer")
#: The driver's next step: send the call with these headers, or wait this many seconds.
Step = dict[str, str] | float
#: The driver's reply: the outcome of sending, or None after waiting.
Outcome = httpx.Response | httpx.TransportError | None

_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 2.0
# If the first one succeeded and its answer was lost, a second one is answered with "not found".
_ONCE: Final = "DELETE"


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and for how long a call is repeated.

    Attributes
    ----------
    attempts
        How often it is sent, at most; 1 means that it is never repeated.
    most_s
        The longest that all waits together may take.
    """

    attempts: int = 4
    most_s: float = 5.0


def exchange(call: Call[Answer], retry: Retry, where: str) -> Generator[Step, Outcome, Answer]:
    """Sends a call through the driver, repeats it where that is safe and useful, and returns its answer.

    A POST carries the same idempotency key each time. A call is repeated if it did not reach the daemon; if
    its answer was lost, unless it is a DELETE; or if the daemon asks for a later repetition
    (``Retry-After``).

    Raises
    ------
    ControlError
        The error in the last answer, or the lack of an answer.
    """
    headers = {"Idempotency-Key": secrets.token_hex(16)} if call.method == "POST" else {}
    waited_s = 0.0
    for attempt in range(retry.attempts):
        outcome = yield headers
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt)
        if isinstance(outcome, httpx.Response):
            if outcome.headers.get("idempotent-replay") == "digest":
                raise ControlError(
                    "conflict",
                    "Carried out, but the answer is lost",
                    f"the request was carried out (status {outcome.status_code}), but the connection ended "
                    "before its answer, and the daemon keeps no answer of this length for a repetition",
                    outcome.status_code,
                )
            if outcome.is_success or outcome.status_code in call.also:
                return call.read(outcome.content)
            error = ControlError.of_answer(outcome.status_code, outcome.content)
            retry_after_s = _seconds(outcome.headers.get("retry-after", ""))
            if retry_after_s is None:
                raise error
            wait_s = max(wait_s, retry_after_s)
        else:
            assert outcome is not None
            error = unanswered(outcome, where)
            reached = not isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout)
            if isinstance(outcome, httpx.ReadTimeout) or (reached and call.method == _ONCE):
                raise error
        if attempt + 1 == retry.attempts or waited_s + wait_s > retry.most_s:
            raise error
        waited_s += wait_s
        yield wait_s
    raise AssertionError("the last attempt returns or raises")


def unanswered(error: httpx.TransportError, where: str) -> ControlError:
    """Returns the error for a call without an answer."""
    title = "The daemon did not answer"
    words = str(error) or type(error).__name__
    if isinstance(error, httpx.ReadTimeout):
        return ControlError(
            "deadline",
            title,
            f"{where} did not answer in time: the request may or may not have been carried out",
            0,
        )
    if refusal := _tls_refusal(words, where):
        return ControlError(UNREACHABLE, title, refusal, 0)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        detail = f"no daemon answers at {where} ({words}): start one (kvxfer serve), or name another"
        return ControlError(UNREACHABLE, title, detail, 0)
    detail = f"the connection to {where} ended: {words}"
    if where.startswith("http:") and isinstance(error, httpx.RemoteProtocolError):
        detail += "; if the daemon has a certificate, write https"
    return ControlError(UNREACHABLE, title, detail, 0)


def _tls_refusal(words: str, where: str) -> str:
    """Returns what to do where something listens, but TLS failed; ``""`` for other errors."""
    if "WRONG_VERSION_NUMBER" in words or "record layer failure" in words:
        return f"{where} speaks http, not https: write http{where.removeprefix('https')}"
    if "CERTIFICATE_VERIFY_FAILED" not in words:
        return ""
    reason = words.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or words
    cure = "name the file of its authority (--ca-file, or verify= in Python)"
    if "not valid for" in reason:
        cure = "address the daemon by a name in its certificate"
    return f"the certificate of {where} is not trusted: {reason}: {cure}"


def _seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None
