"""The program of the NIXL baseline, on kvxfer's facade of NIXL's interface."""

from __future__ import annotations

import os
from typing import Any

import kvxfer
from kvxfer.connectors.nixl import install_as_nixl

install_as_nixl(replace=True)

from kvxfer.bench.compare.adapters.nixl_adapter import NixlEnd  # noqa: E402 - finds the facade


class FacadeEnd(NixlEnd):
    """One agent, which makes progress by itself."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.must_poll = False
        self.settings |= {"backend": "KVXFER"}

    @staticmethod
    def installed_version() -> str:
        return kvxfer.__version__


def create(options: dict[str, Any]) -> FacadeEnd:
    """Returns an agent that is ready to register memory."""
    os.environ.setdefault("KVXFER_NIXL_TRANSPORTS", options["transport"])
    return FacadeEnd(options)
