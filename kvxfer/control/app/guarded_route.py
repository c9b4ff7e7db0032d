"""Checks of a route with a role, before its handler: the role, the tenants, and that the body is JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

from kvxfer.control.daemon.audit_log import Need
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.tokens import ROLES, Caller

if TYPE_CHECKING:
    from kvxfer.control.app.changes import Changes

_JSON: Final = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.ASCII | re.IGNORECASE)


def caller_of(request: Request) -> Caller:
    """Returns the caller that the guard has found."""
    caller = request.scope["kvxfer.caller"]
    assert isinstance(caller, Caller)
    return caller


def require_all_tenants(caller: Caller, what: str) -> None:
    """Refuses a token that is limited to tenants, for things that belong to no tenant."""
    if caller.tenants is not None:
        raise Refusal("forbidden", _limited(caller, what))


def _limited(caller: Caller, what: str) -> str:
    return f"this token is limited to tenants {sorted(caller.tenants or ())}, and cannot be used for {what}"


class GuardedRoute(APIRoute):
    """A route that refuses the wrong role or a tenant's token before it reads a body, and logs changes."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Returns FastAPI's handler behind those checks."""
        inner = super().get_route_handler()
        extra = self.openapi_extra or {}
        role = extra.get("x-kvxfer-role")
        if role is None:
            return inner
        assert role in ROLES
        change = extra.get("x-kvxfer-change")
        operation_id = self.operation_id or ""

        need: Need = extra.get("x-kvxfer-needs", "room")
        of_tenants = extra.get("x-kvxfer-tenants", False)

        async def guarded(request: Request) -> Response:
            caller = caller_of(request)
            if not caller.may(role):
                words = (
                    f"{request.method} {self.path} needs the role {role}, and the token named "
                    f"{caller.name!r} has {caller.role}"
                )
            elif caller.tenants is not None and not of_tenants:
                words = _limited(caller, f"{request.method} {self.path}")
            else:
                # Checked here, because FastAPI would report a refused body as one that it cannot parse.
                if await request.body() and self.body_field is not None:
                    _require_json(request)
                if change is None:
                    return await inner(request)
                changes: Changes = request.app.state.changes
                return await changes.run(operation_id, change, need, caller, request, inner)
            if change is not None:
                request.app.state.changes.note_refused(operation_id, caller, request)
            raise Refusal("forbidden", words)

        return guarded


def _require_json(request: Request) -> None:
    kind = request.headers.get("content-type")
    if kind is None or _JSON.fullmatch(kind) is None:
        found = "has no Content-Type" if kind is None else f"has Content-Type {kind[:100]!r}"
        raise Refusal("unsupported-media-type", f"the body {found}: send Content-Type: application/json")
