"""The directory that the daemon keeps."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request

from kvxfer.control import schema
from kvxfer.control.app.agent_routes import Limit
from kvxfer.control.app.api import Api
from kvxfer.control.daemon.node import NodeDaemon
from kvxfer.control.schema.directory_models import Incarnation


def add_directory(api: Api, daemon: NodeDaemon) -> None:
    """Adds it."""
    names = daemon.names

    @api.get("/v1/directory", "read", tags=["directory"])
    async def list_entries(
        prefix: Annotated[str, Query(max_length=128)] = "",
        cursor: Annotated[str, Query(max_length=128)] = "",
        limit: Limit = 100,
    ) -> schema.DirectoryEntries:
        """Entries whose names begin with `prefix`, ordered by name.

        Events of the topic `directory` above the first answer's `index` report later changes.
        """
        return names.shown(prefix, cursor, limit)

    @api.change("PUT", "/v1/directory", "transfer", tags=["directory"])
    async def publish_entry(request: Request, asked: schema.EntryPublication) -> schema.EntryPublished:
        """Publishes an entry under its name."""
        return await names.publish(asked)

    @api.keep("PUT", "/v1/directory/keep", "transfer", tags=["directory"])
    async def keep_entries(request: Request, asked: schema.EntriesKept) -> schema.EntriesLost:
        """Starts the time of entries anew. This counts as no change, so the audit log has no line of it."""
        return names.keep(asked)

    @api.change("DELETE", "/v1/directory/entries/{name:path}", "transfer", tags=["directory"])
    async def withdraw_entry(
        request: Request,
        name: Annotated[str, Path(min_length=1, max_length=128)],
        incarnation: Annotated[Incarnation | None, Query(description="Default: any incarnation")] = None,
    ) -> schema.EntryPublished:
        """Removes the entry of a name, if it belongs to this incarnation."""
        return await names.withdraw(name, incarnation)
