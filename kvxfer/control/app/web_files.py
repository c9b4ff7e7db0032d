"""The files that a browser shows; there are few, and each is read once."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Final

from fastapi import Request, Response
from starlette.routing import Route

from kvxfer.control.schema.problems import Refusal

_FOLDER: Final = Path(__file__).parents[1] / "web"


class WebFiles:
    """Answers GET of ``/`` and of the files of one folder. It never builds a path from a request."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._folder = folder
        self._files: dict[str, tuple[bytes, str]] | None = None

    def routes(self) -> list[Route]:
        """Returns the routes of the folder's files and of its assets; add them after all other routes."""
        paths = ("/", "/{name}", "/assets/{name}")
        return [Route(path, self._answer, methods=["GET"], include_in_schema=False) for path in paths]

    async def _answer(self, request: Request) -> Response:
        if self._files is None:
            self._files = self._read()
        name = request.url.path.removeprefix("/") or "index.html"
        if name not in self._files:
            raise Refusal("not-found", f"there is nothing at {request.url.path}")
        content, kind = self._files[name]
        return Response(content, media_type=kind)

    def _read(self) -> dict[str, tuple[bytes, str]]:
        if not self._folder.is_dir():
            return {}
        return {
            str(path.relative_to(self._folder)): (
                path.read_bytes(),
                mimetypes.guess_type(path.name)[0] or "application/octet-stream",
            )
            for path in self._folder.rglob("*")
            if path.is_file() and path.suffix in (".html", ".js", ".css", ".svg", ".ico", ".png")
        }
