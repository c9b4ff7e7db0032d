"""An empty application of the daemon's framework, served as a program: ``python -m ... SOCKET``."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI

app = FastAPI()


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answers while it runs."""
    return {"status": "ok"}


if __name__ == "__main__":
    uvicorn.run(app, uds=sys.argv[1], log_level="error", access_log=False)
