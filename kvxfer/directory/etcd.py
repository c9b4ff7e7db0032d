"""A directory in etcd: ``EtcdDirectory("etcd://10.0.0.1:2379,10.0.0.2:2379/cluster-a")``."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple
from urllib.parse import parse_qsl

from kvxfer.directory.distant import Snapshot, Update
from kvxfer.directory.entry import Entry
from kvxfer.directory.etcd_gateway import Certificates, EtcdGateway, LeaseGoneError, Pair
from kvxfer.directory.mirrored import KEEP_EVERY_S, MirroredDirectory
from kvxfer.errors import PeerError, UsageError, invalid
from kvxfer.log import logger

SCHEME: Final = "etcd://"
_DEFAULT_PREFIX: Final = "kvxfer"
_URL: Final = re.compile(r"etcd://([A-Za-z0-9._:,\[\]-]+)(?:/([^?#]*))?(?:\?([^#]*))?")
_SERVER: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_OPTIONS: Final = ("ca", "certificate", "key", "tls")
# Two calls of `keep` may fail; the third still comes in time.
_OWN_TTL_S: Final = math.ceil(3 * KEEP_EVERY_S) + 1
# etcd's limit.
_LONGEST_TTL_S: Final = 9_000_000_000
# A cluster has fewer agents; further keys under the prefix are not read.
_MOST_ENTRIES: Final = 65_536
_MOST_WARNINGS: Final = 64


class EtcdDirectory(MirroredDirectory):
    """A `Directory` in an etcd cluster, through its HTTP gateway (etcd 3.4 or later), with a local copy.

    Each entry is a key, ``PREFIX/agents/NAME``, with an etcd lease. So the entry of an agent that dies is
    removed after its ``directory_ttl_s``, or after ten seconds if it has none. `MirroredDirectory` explains
    how the copy follows etcd, what happens while etcd is away, and what `close` does.

    Parameters
    ----------
    url
        ``etcd://host:port[,host:port...][/PREFIX][?ca=FILE&certificate=FILE&key=FILE]``. With ``ca`` or
        ``certificate`` it uses TLS (``tls=1``: with the system's authorities). Use different prefixes for
        clusters of agents that must not meet; the default is ``kvxfer``.

    Raises
    ------
    UsageError
        ``invalid-argument``: `url` is not such a URL. Whether etcd answers shows later (`away`).
    """

    def __init__(self, url: str) -> None:
        where = EtcdUrl.parse(url)
        super().__init__(EtcdEntries(EtcdGateway(where.servers, where.certificates), where.prefix))


class EtcdUrl(NamedTuple):
    """The parts of a URL."""

    servers: tuple[str, ...]
    prefix: str
    certificates: Certificates | None

    @classmethod
    def parse(cls, url: str) -> EtcdUrl:
        """Reads an ``etcd://`` URL."""
        found = _URL.fullmatch(url) if isinstance(url, str) else None
        servers = () if found is None else tuple(found[1].split(","))
        if found is None or not all(_SERVER.fullmatch(server) for server in servers):
            raise invalid(f'{url!r} is not a directory: write "etcd://host:port[,host:port...][/PREFIX]"')
        options = dict(parse_qsl(found[3] or "", keep_blank_values=True))
        for name in options:
            if name not in _OPTIONS:
                raise invalid(f"{url!r} has the option {name!r}, which is not one of {', '.join(_OPTIONS)}")
        if "key" in options and "certificate" not in options:
            raise invalid(f"{url!r} has a key, but no certificate for it")
        files = {name: options.get(name, "") for name in ("ca", "certificate", "key")}
        certificates = Certificates(**files) if options else None
        return cls(servers, found[2] or _DEFAULT_PREFIX, certificates)


class _Life(NamedTuple):
    """The etcd lease of one incarnation."""

    incarnation: bytes
    ttl_s: int
    lease: int


class EtcdEntries:
    """The entries under one prefix; see `kvxfer.directory.distant.Distant`."""

    def __init__(self, gateway: EtcdGateway, prefix: str) -> None:
        self.where = gateway.where
        self._gateway = gateway
        self._prefix = f"{prefix}/agents/".encode()
        self._end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        self._own_lease = 0
        self._lives: dict[str, _Life] = {}
        self._unread: set[bytes] = set()
        self._followed = ""

    async def snapshot(self) -> Snapshot:
        """Returns all entries."""
        pairs, revision = await self._gateway.range(self._prefix, self._end, _MOST_ENTRIES)
        found = (self._entry(pair) for pair in pairs)
        return Snapshot({entry.name: entry for entry in found if entry is not None}, revision)

    async def updates(self, after: int) -> AsyncIterator[Sequence[Update]]:
        """Yields the changes after a revision."""
        self._followed = self._gateway.server
        async for events in self._gateway.watch(self._prefix, self._end, after + 1):
            yield [
                Update(self._name(pair.key), self._entry(pair) if is_there else None, pair.revision)
                for pair, is_there in events
            ]

    async def publish(self, entry: Entry, ttl_s: float | None, replace: bool) -> int | None:
        """Publishes `entry`, unless another incarnation has the name and must not be replaced."""
        key = self._key(entry.name)
        while True:
            pairs, _ = await self._gateway.range(key)
            there = pairs[0] if pairs else None
            before = None if there is None else self._entry(there)
            if before is not None and before.incarnation != entry.incarnation and not replace:
                self._lives.pop(entry.name, None)
                return None
            lease = await self._lease_of(entry, ttl_s)
            if there is not None and before == entry and there.lease == lease:
                return there.revision  # it was renewed
            revision = 0 if there is None else there.revision
            try:
                written = await self._gateway.put_if(key, entry.to_bytes(), lease, revision)
            except LeaseGoneError:  # in between
                if lease == self._own_lease:
                    self._own_lease = 0
                continue
            if written is not None:
                return written

    async def _lease_of(self, entry: Entry, ttl_s: float | None) -> int:
        """Returns a lease with its full time left; revokes a lease that no longer fits."""
        life = self._lives.get(entry.name)
        ttl = None if ttl_s is None else math.ceil(min(ttl_s, _LONGEST_TTL_S))
        is_same = life is not None and (life.incarnation, life.ttl_s) == (entry.incarnation, ttl)
        if life is not None and is_same and await self._gateway.keep_alive(life.lease):
            return life.lease
        if ttl is None:
            self._lives.pop(entry.name, None)
            return await self._own()
        lease = await self._gateway.grant(ttl)
        self._lives[entry.name] = _Life(entry.incarnation, ttl, lease)
        return lease

    async def withdraw(self, name: str, incarnation: bytes) -> int:
        """Removes the entry if it is this incarnation's."""
        key = self._key(name)
        written: int | None = None
        while written is None:
            pairs, _ = await self._gateway.range(key)
            before = self._entry(pairs[0]) if pairs else None
            if before is not None and before.incarnation == incarnation:
                written = await self._gateway.delete_if(key, pairs[0].revision)
            else:
                written = pairs[0].revision if pairs else 0
        life = self._lives.get(name)
        if life is not None and life.incarnation == incarnation:
            del self._lives[name]
            await self._gateway.revoke(life.lease)
        return written

    async def keep(self) -> bool:
        """Renews the leases of entries without a `ttl_s`; if there are none, checks whether etcd answers."""
        kept = True
        if not self._own_lease:
            await self._gateway.range(self._prefix, limit=1)
        elif not await self._gateway.keep_alive(self._own_lease):
            self._own_lease = 0
            kept = False
        if self._followed and self._followed != self._gateway.server:
            # The server may be cut off from the other servers, and then reports no more changes.
            raise PeerError(
                f"etcd at {self._followed}, whose changes were followed, does not answer", code="unreachable"
            )
        return kept

    async def renew(self) -> None:
        """Drops connections."""
        self._followed = ""
        await self._gateway.close()

    async def close(self) -> None:
        """Removes the entries that were published without a `ttl_s`."""
        try:
            if self._own_lease:
                await self._gateway.revoke(self._own_lease)
        finally:
            await self._gateway.close()

    # ---- inside -----------------------------------------------------------------------------

    async def _own(self) -> int:
        if not self._own_lease:
            self._own_lease = await self._gateway.grant(_OWN_TTL_S)
        return self._own_lease

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode(errors="surrogatepass")

    def _name(self, key: bytes) -> str:
        return key[len(self._prefix) :].decode(errors="surrogatepass")

    def _entry(self, pair: Pair) -> Entry | None:
        """Returns the pair's entry if it is one of that name; other programs may write such keys too."""
        try:
            entry = Entry.from_bytes(pair.value)
            if self._key(entry.name) == pair.key:
                return entry
            why = f"it is the entry of {entry.name!r}"
        except UsageError as error:
            why = str(error.args[0])
        if pair.key not in self._unread and len(self._unread) < _MOST_WARNINGS:
            self._unread.add(pair.key)
            logger().warning(
                "kvxfer: %s: the value of key %r is not an agent's entry: %s", self.where, pair.key, why
            )
        return None
