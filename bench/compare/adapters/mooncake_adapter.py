"""Mooncake's Transfer Engine as one end of a baseline: its TCP transport, in host memory."""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import Any

from mooncake import engine  # type: ignore[import-not-found]

_HOST = "127.0.0.1"
_PACKAGE = "mooncake-transfer-engine-non-cuda"


class MooncakeEnd:
    """One engine. It moves bytes in threads of its own, so neither end has to poll."""

    must_poll = False

    def __init__(self, options: dict[str, Any]) -> None:
        self._batch_pages: int = options["batch_pages"]
        self._notifies: bool = options["notifies"]
        self.version = importlib.metadata.version(_PACKAGE)
        self._engine = engine.TransferEngine()
        _check(self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
        self.settings = {
            "protocol": "tcp",
            "metadata": "P2PHANDSHAKE",
            "batch_pages": self._batch_pages,
            **{name: value for name, value in os.environ.items() if name.startswith("MC_")},
        }

    def register(self, address: int, nbytes: int) -> None:
        self._address = address
        _check(self._engine.register_memory(address, nbytes), "register_memory")

    def contact(self) -> dict[str, Any]:
        return {"session": f"{_HOST}:{self._engine.get_rpc_port()}"}

    def connect(self, contact: dict[str, Any]) -> None:
        # The handshake happens with the first transfer.
        self._session: str = contact["session"]
        self._far_address: int = contact["address"]

    def prepare(self, page_nbytes: int, num_pages: int) -> None:
        self._page_nbytes = page_nbytes

    def move(self, op: str, local: Any, remote: Any, tag: str, timeout_s: float) -> int:
        opcode = engine.TransferOpcode.Write if op == "write" else engine.TransferOpcode.Read
        nbytes = self._page_nbytes
        start_ns = time.monotonic_ns()
        near = (local.astype("int64") * nbytes + self._address).tolist()
        far = (remote.astype("int64") * nbytes + self._far_address).tolist()
        lengths = [nbytes] * len(near)
        if self._notifies:
            # The asynchronous calls take no notification.
            notify = engine.TransferNotify("bench", tag)
            status = self._engine.batch_transfer_sync(self._session, near, far, lengths, opcode, notify)
            _check(status, f"{op} of {len(near)} pages")
            return time.monotonic_ns() - start_ns
        post_ns = time.monotonic_ns() - start_ns
        step = self._batch_pages
        for start in range(0, len(near), step):
            part = slice(start, start + step)
            start_ns = time.monotonic_ns()
            batch = self._engine.batch_transfer_async(
                self._session, near[part], far[part], lengths[part], opcode
            )
            post_ns += time.monotonic_ns() - start_ns
            if batch == 0:
                raise RuntimeError(f"Mooncake refused a batch of {len(near[part])} pages")
            _check(self._engine.get_batch_transfer_status([batch]), f"{op} of {len(near[part])} pages")
        return post_ns

    def notifications(self) -> list[str]:
        return [note.msg for note in self._engine.get_notifies()]


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"Mooncake's {what} returned {status}")


def create(options: dict[str, Any]) -> MooncakeEnd:
    """Returns an engine that is ready to register memory."""
    return MooncakeEnd(options)
