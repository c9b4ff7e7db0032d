"""The steps of every change: check the audit log's room, handle the idempotency key, write the log's line."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError

from kvxfer.control.app.problem_answers import as_refusal
from kvxfer.control.audit_log import AuditLog
from kvxfer.control.problems import Refusal
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
        self, operation: str, kind: str, caller: Caller, request: Request, inner: Inner
    ) -> Response:
        """Answers a request, or refuses it; either is one line of the audit log."""
        self._audit.require_room()
        key = request.headers.get("idempotency-key")
        if key is None or request.method != "POST":
            return await self._logged(operation, caller, request, inner)
        if not _KEY.fullmatch(key):
            raise Refusal("invalid-argument", "Idempotency-Key must be 1 to 128 visible ASCII characters")
        whole_key = f"{caller.key} {key}"
        seen = fingerprint(operation, request.url.path, await request.body())
        before = await self._answers.begin(whole_key, seen, time.time())
        if before is not None:
            if kind == "once":
                raise Refusal(
                    "conflict",
                    "this request was already carried out; its answer contained a secret, which is shown "
                    "only once",
                )
            return Response(before.body, before.status, {"Idempotent-Replay": "true"}, "application/json")
        try:
            response = await self._logged(operation, caller, request, inner)
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

    async def _logged(self, operation: str, caller: Caller, request: Request, inner: Inner) -> Response:
        try:
            response = await inner(request)
        except Exception as error:
            if not isinstance(error, RequestValidationError):
                self._append(operation, caller, request, as_refusal(error).code)
            raise
        except BaseException:
            self._append(operation, caller, request, "interrupted")
            raise
        self._append(operation, caller, request, "done")
        return response

    def note_refused(self, operation: str, caller: Caller, request: Request) -> None:
        """Logs a request that the caller's role does not permit."""
        self._append(operation, caller, request, "forbidden")

    def _append(self, operation: str, caller: Caller, request: Request, result: str) -> None:
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
        self._audit.append(line)
