"""Metadata in a torch TCPStore, which reports no changes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore

from kvxfer.connectors.nixl.metadata_store import MetadataStore
from kvxfer.errors import PeerError, invalid
from kvxfer.raw_agent import RawAgent

_ANSWER_S: Final = 5.0
_PAUSE_S: Final = 0.05


class TcpStoreMetadata(MetadataStore):
    """Metadata under ``nixl/AGENT/LABEL``. They stay until their agent withdraws them, even after it dies.

    Parameters
    ----------
    endpoint
        ``HOST:PORT`` of the store.

    Raises
    ------
    UsageError
        ``invalid-argument``: the endpoint is not of this form.
    """

    def __init__(self, raw_agent: RawAgent, name: str, wait_s: float, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise invalid(f"NIXL_TCPSTORE_ENDPOINT is {endpoint!r}: write HOST:PORT")
        super().__init__(raw_agent, name, wait_s, f"the TCPStore at {endpoint}")
        self._place = (host.strip("[]"), int(port))
        self._store: TCPStore | None = None
        self._sent: set[str] = set()
        self._following: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def _connected(self) -> TCPStore:
        if self._store is None:
            host, port = self._place
            timeout = timedelta(seconds=_ANSWER_S)
            try:
                self._store = await asyncio.to_thread(
                    TCPStore, host, port, is_master=False, timeout=timeout, wait_for_workers=False
                )
            except RuntimeError as error:
                raise PeerError(f"{self._where} does not answer: {error}", code="unreachable") from error
        return self._store

    async def _put(self, label: str, metadata: bytes) -> None:
        store = await self._connected()
        try:
            await asyncio.to_thread(store.set, self._key(self._own, label), metadata.hex())
        except RuntimeError as error:
            raise PeerError(f"{self._where} does not answer: {error}", code="unreachable") from error
        self._sent.add(label)

    async def _remove(self) -> None:
        store = await self._connected()
        for label in tuple(self._sent):
            with suppress(RuntimeError):
                await asyncio.to_thread(store.delete_key, self._key(self._own, label))
        self._sent.clear()

    async def _begin_to_follow(self, agent: str, label: str) -> None:
        if (before := self._following.pop((agent, label), None)) is not None:
            before.cancel()
        self._following[agent, label] = asyncio.create_task(self._fetch(agent, label))

    async def _fetch(self, agent: str, label: str) -> None:
        key = self._key(agent, label)
        with suppress(TimeoutError, PeerError, RuntimeError, ValueError):
            async with asyncio.timeout(self._wait_s):
                store = await self._connected()
                while not await asyncio.to_thread(store.check, [key]):  # noqa: ASYNC110 (it tells nobody)
                    await asyncio.sleep(_PAUSE_S)
                self._take_in(agent, bytes.fromhex((await asyncio.to_thread(store.get, key)).decode()))
                return
        self._not_there(agent, label)

    async def _end_following(self, agent: str) -> None:
        for each in [each for each in self._following if each[0] == agent]:
            self._following.pop(each).cancel()

    async def _end(self) -> None:
        for task in self._following.values():
            task.cancel()
        self._following.clear()
        self._store = None

    @staticmethod
    def _key(agent: str, label: str) -> str:
        return f"nixl/{agent}/{label}"
