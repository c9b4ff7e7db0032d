"""NIXL as one end of a baseline: agents over its UCX backend, in host memory."""

from __future__ import annotations

import base64
import importlib.metadata
import os
import time
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

# The agent reads this when it is created. A user's own setting stays.
_UCX_TLS = {"shm": "posix,sysv,cma,self,tcp"}
_OVER_TCP = "tcp,self"
# A progress thread would need the core that a spinning caller takes.
_PAUSE_S = 20e-6
# How many polls between two looks at the clock.
_POLLS = 64


class NixlEnd:
    """One agent. Descriptors of all pages are prepared once; a transfer names pages by index."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._thread: bool = options["progress_thread"]
        self._pause_s = _PAUSE_S if options["pause"] else 0.0
        self.must_poll = not self._thread
        self.version = self.installed_version()
        self._agent = nixl_agent(
            options["role"], nixl_agent_config(enable_prog_thread=self._thread, backends=["UCX"])
        )
        self.settings = {
            "backend": "UCX",
            "progress_thread": self._thread,
            "poll_pause": f"{self._pause_s * 1e6:g} us",
            "reposts_one_handle": options["same_pages"],
            **{name: value for name, value in os.environ.items() if name.startswith(("UCX_", "NIXL_"))},
        }
        self._remote = ""
        self._far_address = 0
        self._prepared: tuple[Any, Any] = (None, None)
        #: Kept so that the same pages can be moved again; NIXL calls that reposting.
        self._handle: Any = None
        self._reposts: bool = options["same_pages"]

    @staticmethod
    def installed_version() -> str:
        """Returns the version that is measured."""
        return importlib.metadata.version("nixl")

    def register(self, address: int, nbytes: int) -> None:
        self._address = address
        self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")

    def contact(self) -> dict[str, Any]:
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode()}

    def connect(self, contact: dict[str, Any]) -> None:
        remote = self._agent.add_remote_agent(base64.b64decode(contact["metadata"]))
        self._remote = remote.decode() if isinstance(remote, bytes) else remote
        self._far_address = contact["address"]

    def prepare(self, page_nbytes: int, num_pages: int) -> None:
        def pages(base: int) -> Any:
            table = np.zeros((num_pages, 3), np.uint64)
            table[:, 0] = base + np.arange(num_pages, dtype=np.uint64) * np.uint64(page_nbytes)
            table[:, 1] = page_nbytes
            return table

        self._prepared = (
            self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages(self._address), "DRAM"),
            self._agent.prep_xfer_dlist(self._remote, pages(self._far_address), "DRAM"),
        )

    def move(self, op: str, local: Any, remote: Any, tag: str, timeout_s: float) -> int:
        start_ns = time.monotonic_ns()
        handle = self._handle
        if handle is None:
            near, far = self._prepared
            handle = self._agent.make_prepped_xfer(op.upper(), near, local, far, remote, tag.encode())
        state = self._agent.transfer(handle, tag.encode())
        post_ns = time.monotonic_ns() - start_ns
        if state == "PROC":
            state = self._wait(handle, time.monotonic() + timeout_s)
        if state != "DONE":
            raise RuntimeError(
                f"NIXL's {op} ended with {state} (PROC: still in progress after {timeout_s:g} s)"
            )
        if self._reposts:
            self._handle = handle
        else:
            self._agent.release_xfer_handle(handle)
        return post_ns

    def _wait(self, handle: Any, deadline: float) -> str:
        while time.monotonic() < deadline:
            for _ in range(_POLLS):
                if self._pause_s:
                    time.sleep(self._pause_s)
                state: str = self._agent.check_xfer_state(handle)
                if state != "PROC":
                    return state
        return "PROC"

    def notifications(self) -> list[str]:
        if self._pause_s:
            time.sleep(self._pause_s)
        found = self._agent.get_new_notifs()
        if not found:
            return []
        return [tag.decode() for tags in found.values() for tag in tags]


def create(options: dict[str, Any]) -> NixlEnd:
    """Returns an agent that is ready to register memory."""
    os.environ.setdefault("UCX_TLS", _UCX_TLS.get(options["transport"], _OVER_TCP))
    return NixlEnd(options)
