"""The application: all routes over one daemon."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request, Response

import kvxfer
from kvxfer.control.app.agent_routes import add_agents
from kvxfer.control.app.api import Api
from kvxfer.control.app.changes import Changes
from kvxfer.control.app.directory_routes import add_directory
from kvxfer.control.app.event_routes import add_events
from kvxfer.control.app.guard import Guard
from kvxfer.control.app.lease_routes import add_leases
from kvxfer.control.app.node_routes import add_node
from kvxfer.control.app.page_routes import add_pages
from kvxfer.control.app.problem_answers import add_problems
from kvxfer.control.app.scrape import Metrics
from kvxfer.control.app.token_routes import add_tokens
from kvxfer.control.app.trace_routes import add_traces
from kvxfer.control.app.transfer_routes import add_transfers
from kvxfer.control.app.web_files import WebFiles
from kvxfer.control.daemon.node import NodeDaemon
from kvxfer.control.schema import Problem


class DaemonApp:
    """An ASGI application, and the event streams that its server has to close.

    Parameters
    ----------
    daemon
        The daemon that it serves.
    hosts
        Host names of requests over TCP that it accepts, besides loopback's.
    uids
        Users that are admins over the unix socket.
    rate, burst
        Limit of each caller: requests a second, and requests at once.
    """

    def __init__(
        self,
        daemon: NodeDaemon,
        *,
        hosts: Collection[str] = (),
        uids: Collection[int] = (),
        rate: float = 500.0,
        burst: float = 1000.0,
    ) -> None:
        api = FastAPI(
            title="kvxfer daemon",
            version=kvxfer.__version__,
            openapi_url="/v1/openapi.json",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        api.state.changes = Changes(daemon.audit, daemon.answers)
        add_problems(api)
        routes = Api(api)
        add_node(routes, daemon)
        add_agents(routes, daemon)
        add_transfers(routes, daemon)
        add_traces(routes, daemon)
        add_leases(routes, daemon)
        add_pages(routes, daemon)
        add_tokens(routes, daemon)
        add_directory(routes, daemon)
        self.streams = add_events(routes, daemon)
        metrics = Metrics(daemon, self.streams)

        @routes.get(
            "/metrics",
            "read",
            tags=["node"],
            response_class=Response,
            responses={
                200: {
                    "description": "Prometheus' text",
                    "content": {"text/plain": {"schema": {"type": "string"}}},
                }
            },
        )
        async def get_metrics(request: Request) -> Response:
            """Figures in Prometheus' text; in OpenMetrics, with exemplars, if the client accepts that."""
            await daemon.certificates.refresh()
            text, content_type = metrics.text(request.headers.get("accept", ""))
            return Response(text, headers={"content-type": content_type})

        api.router.routes.extend(WebFiles().routes())
        made = api.openapi

        def described() -> dict[str, Any]:
            if api.openapi_schema is None:
                document = made()
                parts = document.setdefault("components", {})
                parts.setdefault("securitySchemes", {})["token"] = {"type": "http", "scheme": "bearer"}
                parts.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
                for name in ("HTTPValidationError", "ValidationError"):
                    parts["schemas"].pop(name, None)
            return api.openapi_schema or {}

        api.openapi = described  # type: ignore[method-assign]
        self.api = api
        self.asgi = Guard(api, daemon.tokens, hosts, uids, rate, burst)

    def close(self) -> None:
        """Ends the event streams, which would otherwise never end."""
        self.streams.close()
