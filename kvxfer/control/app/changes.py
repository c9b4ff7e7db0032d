"""The steps of every change: check the audit log's room, handle the idempotency key, write the log's line."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError

from kvxfer.control.app.problem_answers import as_refusal
from kvxfer.control.daemon.audit_log import AuditLog, Need
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.answers import Answer, Answers, fingerprint
from kvxfer.control.state.tokens import Caller

_KEY: Final = re.compile(r"[!-~]{1,128}")
Inner = Callable[[Request], Awaitable[Response]]


class Changes:
    """Runs requests that change something."""

    def __init__(self, audit: AuditLog, answers: Answers) -> None:
        self._audit = audit
        self._answers = answers

    async def run(
        self, operation: str, kind: str, need: Need, caller: Caller, request: Request, inner: Inner
    ) -> Response:
        """Answers a request, or refuses it; either is one line of the audit log."""
        self._audit.require_room(need)
        key = request.headers.get("idempotency-key")
        if key is None or request.method != "POST":
            return await self._logged(operation, need, caller, request, inner)
        if not _KEY.fullmatch(key):
            raise Refusal("invalid-argument", "Idempotency-Key must be 1 to 128 visible ASCII characters")
        seen = fingerprint(operation, request.url.path, await request.body())
        whole_key = (caller.key, key)
        try:
            before = await self._answers.begin(whole_key, seen, time.time())
        except Refusal as error:
            if error.code != "unavailable" or need == "room":
                raise
            # It takes something back, which may be done twice; there is no room to remember that.
            return await self._logged(operation, need, caller, request, inner)
        if before is not None:
            if kind == "once":
                raise Refusal(
                    "conflict",
                    "this request was already carried out; its answer contained a secret, which is shown "
                    "only once",
                )
            return _repeated(before)
        try:
            response = await self._logged(operation, need, caller, request, inner)
        except BaseException as error:
            # A refused request did nothing. After any other error it is unknown what was done.
            if isinstance(error, RequestValidationError | Refusal):
                await self._answers.abandon(whole_key)
            else:
                await self._answers.forget_running(whole_key)
            raise
        body = b"" if kind == "once" else bytes(response.body)
        await self._answers.end(whole_key, Answer(response.status_code, body))
        return response

    async def _logged(
        self, operation: str, need: Need, caller: Caller, request: Request, inner: Inner
    ) -> Response:
        try:
            response = await inner(request)
        except Exception as error:
            if not isinstance(error, RequestValidationError):
                self._append(operation, need, caller, request, as_refusal(error).code)
            raise
        except BaseException:
            self._append(operation, need, caller, request, "interrupted")
            raise
        self._append(operation, need, caller, request, "done")
        return response

    def note_refused(self, operation: str, caller: Caller, request: Request) -> None:
        """Logs a request that the caller's role does not permit."""
        self._append(operation, "room", caller, request, "forbidden")

    def _append(self, operation: str, need: Need, caller: Caller, request: Request, result: str) -> None:
        line: dict[str, Any] = {
            "at_s": round(time.time(), 3),
            "who": caller.key,
            "name": caller.name,
            "what": operation,
            "path": request.url.path[:512],
            "result": result,
        }
        if caller.certificate:
            line["certificate"] = caller.certificate
        if request.client is not None:
            line["from"] = request.client.host
        if isinstance(more := request.scope.get("kvxfer.audit"), dict):
            line |= more
        self._audit.append(line, need)


def _repeated(answer: Answer) -> Response:
    """Returns the answer that the first request had; of a long one, its status and its digest."""
    headers = {"Idempotent-Replay": "true"}
    if not answer.digest:
        return Response(answer.body, answer.status, headers, "application/json")
    headers |= {
        "Idempotent-Replay": "digest",
        "Repr-Digest": f"sha-256=:{base64.b64encode(answer.digest).decode()}:",
    }
    return Response(b"{}", answer.status, headers, "application/json")
