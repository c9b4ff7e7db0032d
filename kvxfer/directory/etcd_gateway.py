"""Client of etcd's HTTP gateway (v3), with the calls that a directory needs; uses any server that answers."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx

from kvxfer.directory.shared_client import SharedClient
from kvxfer.errors import PeerError

# After this time the client gives up a server that is stopped or cut off, and tries the next.
_CONNECT_S: Final = 1.0
_ANSWER_S: Final = 2.0
# Of gRPC.
_NOT_FOUND: Final = 5


class LeaseGoneError(PeerError):
    """The lease for a key has ended."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files for TLS; ``""`` for the system's authorities, and for no certificate of our own."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext:
        """Reads the files, as they are now."""
        context = ssl.create_default_context(cafile=self.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key or None)
        return context


@dataclass(frozen=True, slots=True)
class Pair:
    """A key with its value, the revision that wrote it, and its lease (0: none)."""

    key: bytes
    value: bytes
    revision: int
    lease: int


class EtcdGateway:
    """Calls servers of one cluster, first the one that answered last. Belongs to one event loop.

    Every method raises `PeerError` (``unreachable``) within some seconds if no server answers.

    Parameters
    ----------
    servers
        ``host:port`` of each.
    certificates
        None: plain HTTP.
    """

    def __init__(self, servers: Sequence[str], certificates: Certificates | None = None) -> None:
        self._servers = list(servers)
        self._certificates = certificates
        self._connections: SharedClient[httpx.AsyncClient] | None = None

    @property
    def where(self) -> str:
        """The servers, for messages."""
        return "etcd at " + ", ".join(self._servers)

    @property
    def server(self) -> str:
        """The server that answered last."""
        return self._servers[0]

    async def range(self, key: bytes, end: bytes | None = None, limit: int = 0) -> tuple[list[Pair], int]:
        """Returns the pairs from `key` to before `end`, or only that of `key`; and the store's revision."""
        asked: dict[str, Any] = {"key": _text(key), "limit": str(limit)}
        if end is not None:
            asked["range_end"] = _text(end)
        answer = await self._call("kv/range", asked)
        return [_pair(each) for each in answer.get("kvs", ())], _revision(answer)

    async def put_if(self, key: bytes, value: bytes, lease: int, revision: int) -> int | None:
        """Writes `key` if `revision` wrote it last (0: if it does not exist); returns the new revision."""
        put = {"key": _text(key), "value": _text(value), "lease": str(lease)}
        return await self._if(key, revision, {"request_put": put})

    async def delete_if(self, key: bytes, revision: int) -> int | None:
        """Deletes `key` if `revision` wrote it last; returns the new revision."""
        return await self._if(key, revision, {"request_delete_range": {"key": _text(key)}})

    async def _if(self, key: bytes, revision: int, then: Mapping[str, Any]) -> int | None:
        compare = {
            "key": _text(key),
            "target": "MOD",
            "mod_revision": str(revision),
            "result": "EQUAL",
        }
        answer = await self._call("kv/txn", {"compare": [compare], "success": [then]})
        return _revision(answer) if answer.get("succeeded") else None

    async def grant(self, ttl_s: int) -> int:
        """Makes a lease; etcd removes its keys when it ends."""
        return int((await self._call("lease/grant", {"TTL": str(ttl_s)}))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Renews a lease; False if it has ended."""
        answer = await self._call("lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """Ends a lease, if it has not ended."""
        with suppress(LeaseGoneError):
            await self._call("lease/revoke", {"ID": str(lease)})

    async def watch(
        self, key: bytes, end: bytes, revision: int
    ) -> AsyncGenerator[list[tuple[Pair, bool]], None]:
        """Yields pairs that were written (True) or deleted since `revision`; ends if etcd forgot that."""
        asked = {
            "create_request": {
                "key": _text(key),
                "range_end": _text(end),
                "start_revision": str(revision),
            }
        }
        server = self._servers[0]
        url, timeout = self._url(server, "watch"), httpx.Timeout(_ANSWER_S, read=None)
        try:
            async with (
                self._connected() as http,
                http.stream("POST", url, json=asked, timeout=timeout) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise self._unreachable({server: _refusal(response)})
                async for line in response.aiter_lines():
                    said = json.loads(line)
                    result = said.get("result", {})
                    if "error" in said or result.get("canceled"):
                        return
                    events = result.get("events", ())
                    if events:
                        yield [(_pair(each["kv"]), each.get("type") != "DELETE") for each in events]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise self._unreachable({server: _words(error)}) from error
        raise self._unreachable({server: "it ended the watch"})

    async def close(self) -> None:
        """Drops connections. Later calls make new ones, and read the certificates again."""
        if (connections := self._connections) is not None:
            self._connections = None
            await connections.drop()

    # ---- inside -----------------------------------------------------------------------------

    async def _call(self, what: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        why: dict[str, str] = {}
        for server in tuple(self._servers):
            try:
                async with self._connected() as http:
                    response = await http.post(self._url(server, what), json=asked)
                answer = response.json()
            except (httpx.HTTPError, OSError, ValueError) as error:
                why[server] = _words(error)
                continue
            if response.status_code == httpx.codes.OK:
                self._servers.remove(server)
                self._servers.insert(0, server)
                return dict(answer)
            if answer.get("code") == _NOT_FOUND:
                raise LeaseGoneError(str(answer.get("error")), code="unreachable")
            why[server] = _refusal(response)
        raise self._unreachable(why)

    def _connected(self) -> SharedClient[httpx.AsyncClient]:
        if self._connections is None:
            try:
                verify = False if self._certificates is None else self._certificates.context()
            except OSError as error:  # ssl.SSLError is one
                raise PeerError(f"certificates for {self.where}: {error}", code="unreachable") from error
            timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
            # The environment's proxies are for the web, so they are not used.
            self._connections = SharedClient(
                httpx.AsyncClient(verify=verify, timeout=timeout, trust_env=False)
            )
        return self._connections

    def _url(self, server: str, what: str) -> str:
        return f"{'http' if self._certificates is None else 'https'}://{server}/v3/{what}"

    def _unreachable(self, why: Mapping[str, str]) -> PeerError:
        words = "; ".join(f"{server}: {each}" for server, each in why.items())
        return PeerError(f"etcd does not answer ({words})", code="unreachable")


def _refusal(response: httpx.Response) -> str:
    return f"it answered {response.status_code}: {response.text:.200}"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}"


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _pair(told: Mapping[str, Any]) -> Pair:
    return Pair(
        base64.b64decode(told["key"]),
        base64.b64decode(told.get("value", "")),
        int(told.get("mod_revision", 0)),
        int(told.get("lease", 0)),
    )


def _revision(answer: Mapping[str, Any]) -> int:
    return int(answer.get("header", {}).get("revision", 0))
