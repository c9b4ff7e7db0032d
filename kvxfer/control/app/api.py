"""Makes routes: each has a role, an id and its problems; a route that changes something has more checks."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute

from kvxfer.control.daemon.audit_log import Need
from kvxfer.control.schema.problems import Refusal
from kvxfer.control.state.tokens import ROLES, Caller

if TYPE_CHECKING:
    from kvxfer.control.app.changes import Changes

Handler = TypeVar("Handler", bound=Callable[..., Any])

_JSON: Final = re.compile(r"application/([\w.-]+\+)?json\s*(;.*)?", re.ASCII | re.IGNORECASE)
_PROBLEM: Final = {
    "description": "A problem (RFC 9457)",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {"4XX": _PROBLEM, "5XX": _PROBLEM}
IDEMPOTENCY_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "For a POST that may be sent again: the first answer is returned again",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]+$"},
}


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


class Api:
    """Adds routes to an application; a route without a role cannot be written.

    A token that is limited to tenants reaches only routes with ``tenants=True``. Such a route shows and
    changes nothing but what belongs to the caller's tenants.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        app.router.route_class = GuardedRoute

    def get(
        self, path: str, role: str | None, *, tenants: bool = False, **more: Any
    ) -> Callable[[Handler], Handler]:
        """Adds a route that changes nothing; with `role` None it needs no token."""
        return self._add("GET", path, role, None, tenants, more)

    def change(
        self,
        method: str,
        path: str,
        role: str,
        *,
        repeats: bool = True,
        tenants: bool = False,
        needs: Need = "room",
        **more: Any,
    ) -> Callable[[Handler], Handler]:
        """Adds a route that changes something.

        Parameters
        ----------
        repeats
            For a POST: whether its answer may be kept and given again under the same idempotency key. False
            for answers that have a lasting secret: repeating the key is then refused.
        needs
            What it needs of the disk: a change that takes something back is also made while the disk is full.
        """
        if needs != "room":
            more["openapi_extra"] = {**more.get("openapi_extra", {}), "x-kvxfer-needs": needs}
        return self._add(method, path, role, "repeats" if repeats else "once", tenants, more)

    def keep(self, method: str, path: str, role: str, **more: Any) -> Callable[[Handler], Handler]:
        """Adds a route that only renews something; the audit log has no line of it."""
        return self._add(method, path, role, None, False, more)

    def _add(
        self,
        method: str,
        path: str,
        role: str | None,
        change: str | None,
        tenants: bool,
        more: dict[str, Any],
    ) -> Callable[[Handler], Handler]:
        extra: dict[str, Any] = {"security": []}
        if role is not None:
            extra = {"x-kvxfer-role": role, "security": [{"token": []}]}
        if change is not None:
            extra["x-kvxfer-change"] = change
        if tenants:
            extra["x-kvxfer-tenants"] = True
        if method == "POST" and change is not None:
            extra["parameters"] = [IDEMPOTENCY_KEY]
        extra |= more.pop("openapi_extra", {})
        responses = {**PROBLEMS, **more.pop("responses", {})}

        def decorate(handler: Handler) -> Handler:
            self._app.add_api_route(
                path,
                handler,
                methods=[method],
                operation_id=getattr(handler, "__name__", ""),
                openapi_extra=extra,
                responses=responses,
                **more,
            )
            return handler

        return decorate


Inner = Callable[[Request], Awaitable[Response]]
