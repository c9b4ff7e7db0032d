"""Makes routes: each has a role, an id and its problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from fastapi import FastAPI

from kvxfer.control.app.guarded_route import GuardedRoute
from kvxfer.control.daemon.audit_log import Need

Handler = TypeVar("Handler", bound=Callable[..., Any])

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
