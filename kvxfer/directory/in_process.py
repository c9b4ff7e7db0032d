"""A directory for agents of one process: tests, and engines that share one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvxfer.errors import PeerError

if TYPE_CHECKING:
    from concurrent.futures import Future


class MemoryDirectory:
    """Names and addresses in a dictionary. Thread-safe; see `kvxfer.directory.Directory`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._waiting: dict[str, list[Future[str]]] = {}

    def __repr__(self) -> str:
        return f"<MemoryDirectory {dict(self._addresses)}>"

    def publish(self, name: str, address: str) -> None:
        """Makes `address` the one of `name` and wakes those who wait for it."""
        with self._lock:
            self._addresses[name] = address
            waiting = self._waiting.pop(name, [])
        for future in waiting:
            # False: its waiter has given up between the two.
            if future.set_running_or_notify_cancel():
                future.set_result(address)

    def withdraw(self, name: str, address: str) -> None:
        """Forgets `name` if it still has this address."""
        with self._lock:
            if self._addresses.get(name) == address:
                del self._addresses[name]

    async def resolve(self, name: str, timeout_s: float) -> str:
        """Returns the address of `name`, waiting for it to be published."""
        import asyncio

        future = self._ask(name)
        try:
            if future.done():
                return future.result()
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            raise self._unknown(name, timeout_s) from None
        finally:
            self._forget(name, future)

    def resolve_blocking(self, name: str, timeout_s: float) -> str:
        """Returns the address of `name`, blocking until it is published."""
        future = self._ask(name)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise self._unknown(name, timeout_s) from None
        finally:
            self._forget(name, future)

    def _ask(self, name: str) -> Future[str]:
        from concurrent.futures import Future  # it imports logging

        future: Future[str] = Future()
        with self._lock:
            address = self._addresses.get(name)
            if address is None:
                self._waiting.setdefault(name, []).append(future)
        if address is not None:
            future.set_result(address)
        return future

    def _forget(self, name: str, future: Future[str]) -> None:
        future.cancel()
        with self._lock:
            waiting = self._waiting.get(name)
            if waiting is not None and future in waiting:
                waiting.remove(future)
                if not waiting:
                    del self._waiting[name]

    def _unknown(self, name: str, timeout_s: float) -> PeerError:
        with self._lock:
            known = ", ".join(sorted(self._addresses)) or "nobody"
        return PeerError(
            f"no agent {name!r} was published within {timeout_s} s (known: {known})",
            code="unreachable",
            peer=name,
        )
