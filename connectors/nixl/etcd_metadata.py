"""Metadata in etcd: a key for each agent and label, which expires some seconds after its agent dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Final

from kvxfer.connectors.nixl.metadata_store import MetadataStore
from kvxfer.directory.etcd_gateway import Certificates, EtcdGateway, LeaseGoneError, Pair
from kvxfer.errors import KvxferError, PeerError, invalid
from kvxfer.log import logger
from kvxfer.raw_agent import RawAgent

# How long the keys of a dead agent last; a living agent renews them three times as often.
_TTL_S: Final = 10
_PAUSE_S: Final = 0.5
# The value of a key before its deletion: it tells followers that the agent withdrew, not that etcd lost it.
_WITHDRAWN: Final = b""


class EtcdMetadata(MetadataStore):
    """Metadata under ``NAMESPACE/AGENT/LABEL``.

    A follower of an agent adds metadata that the agent sends again, and forgets the agent when it withdraws.
    If an agent's keys expire, a follower forgets it only once no session with it is open. So a host that
    cannot reach etcd loses no transfer.

    Parameters
    ----------
    endpoints
        URLs, separated by commas or semicolons.

    Raises
    ------
    UsageError
        ``invalid-argument``: the endpoints are no URLs.
    """

    def __init__(self, raw_agent: RawAgent, name: str, wait_s: float, endpoints: str, namespace: str) -> None:
        urls = [url.strip() for url in endpoints.replace(";", ",").split(",") if url.strip()]
        schemes = {url.partition("://")[0] for url in urls}
        if len(schemes) != 1 or not schemes <= {"http", "https"}:
            raise invalid(f"NIXL_ETCD_ENDPOINTS is {endpoints!r}: write http://HOST:PORT,... or https://...")
        servers = [url.partition("://")[2].rstrip("/") for url in urls]
        certificates = Certificates("", "", "") if schemes == {"https"} else None
        self._gateway = EtcdGateway(servers, certificates)
        super().__init__(raw_agent, name, wait_s, self._gateway.where)
        self._namespace = namespace.rstrip("/")
        self._lease = 0
        self._kept: dict[str, bytes] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._followed: dict[str, _Followed] = {}
        self._following: set[asyncio.Task[None]] = set()  # also those that are ending

    def _keys(self, agent: str) -> tuple[bytes, bytes]:
        """Returns the range of an agent's keys: the first one, and the first one after them."""
        prefix = f"{self._namespace}/{agent}/".encode()
        return prefix, prefix[:-1] + bytes([prefix[-1] + 1])

    # ---- this agent's metadata

    async def _put(self, label: str, metadata: bytes) -> None:
        self._kept[label] = metadata
        await self._write(label, metadata)
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())

    async def _write(self, label: str, metadata: bytes) -> None:
        key = self._keys(self._own)[0] + label.encode()
        while True:
            pairs, _ = await self._thread.answer(self._gateway.range(key))
            if not self._lease:
                self._lease = await self._thread.answer(self._gateway.grant(_TTL_S))
            with suppress(LeaseGoneError):
                revision = pairs[0].revision if pairs else 0
                put = self._gateway.put_if(key, metadata, self._lease, revision)
                if await self._thread.answer(put) is not None:
                    return
                continue
            self._lease = 0

    async def _keep(self) -> None:
        is_away = False
        while True:
            await asyncio.sleep(_TTL_S / 3)
            try:
                if not self._lease or not await self._thread.answer(self._gateway.keep_alive(self._lease)):
                    self._lease = 0
                    for label, metadata in tuple(self._kept.items()):
                        await self._write(label, metadata)
                is_away = False
            except PeerError as error:
                if not is_away:
                    logger().warning("kvxfer: %s; the agent keeps trying", error)
                is_away = True
            except Exception:  # an answer of another form; the next one may be right
                logger().warning("kvxfer: %s; the agent keeps trying", self._where, exc_info=True)

    async def _remove(self) -> None:
        self._kept.clear()
        first, end = self._keys(self._own)
        pairs, _ = await self._thread.answer(self._gateway.range(first, end))
        for pair in pairs:
            revision = await self._thread.answer(
                self._gateway.put_if(pair.key, _WITHDRAWN, pair.lease, pair.revision)
            )
            if revision is not None:
                await self._thread.answer(self._gateway.delete_if(pair.key, revision))

    # ---- other agents' metadata

    async def _begin_to_follow(self, agent: str, label: str) -> None:
        followed = self._followed.setdefault(agent, _Followed())
        followed.labels.add(label)
        followed.stop_following()
        followed.task = asyncio.create_task(self._follow(agent, followed, label))
        self._following.add(followed.task)
        followed.task.add_done_callback(self._following.discard)

    async def _end_following(self, agent: str) -> None:
        if (followed := self._followed.pop(agent, None)) is not None:
            followed.stop()

    async def _follow(self, agent: str, followed: _Followed, label: str) -> None:
        try:
            async with asyncio.timeout(self._wait_s) as waiting:

                def wait_no_more() -> None:
                    if label in followed.found:
                        waiting.reschedule(None)

                await self._contacts(agent, followed, wait_no_more)
        except TimeoutError:
            self._not_there(agent, label)
            followed.labels.discard(label)
            if followed.was_found:  # it may have withdrawn, and may come back
                await self._contacts(agent, followed, lambda: None)
            else:
                self._followed.pop(agent, None)

    async def _contacts(self, agent: str, followed: _Followed, on_news: Callable[[], None]) -> None:
        """Follows an agent from a snapshot on, for ever; takes a new snapshot after every loss of etcd.

        What is gone from a snapshot was withdrawn or has expired: the events since what was seen last tell
        which, as far as etcd's history reaches back.
        """
        first, end = self._keys(agent)
        while True:
            try:
                pairs, revision = await self._thread.answer(self._gateway.range(first, end))
                there = {_label(pair, first): pair for pair in pairs}
                if not 0 < followed.seen <= revision:  # an etcd that lost its data counts from the start
                    followed.seen = revision
                for label in followed.labels:
                    pair = there.get(label)
                    if pair is None or pair.revision <= followed.seen:  # later ones come as events
                        self._apply(agent, followed, label, pair)
                on_news()
                async with aclosing(self._gateway.watch(first, end, followed.seen + 1)) as news:
                    async for events in news:
                        for pair, is_there in events:
                            followed.seen = pair.revision  # first: what cannot be applied comes once
                            if (label := _label(pair, first)) in followed.labels:
                                self._apply(agent, followed, label, pair if is_there else None)
                        on_news()
                followed.seen = 0  # etcd has forgotten what came next
            except PeerError as error:
                logger().info("kvxfer: %s; the agent keeps trying", error)
            except Exception:  # whatever one answer or one agent's metadata hold, following goes on
                logger().warning(
                    "kvxfer: metadata of %s in %s; the agent keeps trying", agent, self._where, exc_info=True
                )
            await asyncio.sleep(_PAUSE_S * random.uniform(1.0, 2.0))

    def _apply(self, agent: str, followed: _Followed, label: str, pair: Pair | None) -> None:
        if pair is None:
            if followed.found.pop(label, None) is not None and not followed.found:
                followed.lapsing = asyncio.create_task(self._lapse(agent))
        elif pair.value == _WITHDRAWN:
            followed.found.pop(label, None)
            self._forget(agent)
        elif followed.found.get(label) != pair.value:
            followed.found[label] = pair.value
            followed.was_found = True
            followed.stop_lapsing()
            self._take_in(agent, pair.value)

    async def _lapse(self, agent: str) -> None:
        """Forgets an agent that is no longer in etcd, once no session with it is open."""
        while self._raw_agent.is_connected(agent):  # noqa: ASYNC110 (the native side tells of no event)
            await asyncio.sleep(_PAUSE_S)
        self._forget(agent)

    def _forget(self, agent: str) -> None:
        with suppress(KvxferError):  # it was never added
            self._raw_agent.remove_remote(agent)

    async def _end(self) -> None:
        for followed in self._followed.values():
            followed.stop()
        self._followed.clear()
        await asyncio.gather(*self._following, return_exceptions=True)
        if self._keeping is not None:
            self._keeping.cancel()
        try:
            if self._lease:
                await asyncio.wait_for(self._thread.answer(self._gateway.revoke(self._lease)), 2.0)
        finally:
            await self._thread.all_answered()
            await self._gateway.close()


def _label(pair: Pair, first: bytes) -> str:
    return pair.key[len(first) :].decode(errors="replace")


class _Followed:
    """An agent that this one follows."""

    def __init__(self) -> None:
        self.labels: set[str] = set()  # labels that were asked for
        self.found: dict[str, bytes] = {}
        self.was_found = False  # at some time, some label
        self.seen = 0  # etcd's revision up to which the events are known
        self.task: asyncio.Task[None] | None = None
        self.lapsing: asyncio.Task[None] | None = None

    def stop_lapsing(self) -> None:
        if self.lapsing is not None:
            self.lapsing.cancel()
            self.lapsing = None

    def stop_following(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def stop(self) -> None:
        self.stop_lapsing()
        self.stop_following()
