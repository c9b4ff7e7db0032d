"""The daemon's REST as Python: `Client`, and `AsyncClient` with the same methods as coroutines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import httpx

import kvxfer
from kvxfer.control import schema
from kvxfer.control.client import client_calls as calls
from kvxfer.control.client.client_calls import Call
from kvxfer.control.client.client_error import UNREACHABLE, ControlError
from kvxfer.control.client.client_events import SILENT_S, EventCursor, Missed
from kvxfer.control.client.client_exchange import Outcome, Retry, exchange, unanswered
from kvxfer.control.client.daemon_address import DaemonAddress, certificate_of, token_of
from kvxfer.errors import invalid

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Item = TypeVar("Item")

_CONNECT_TIMEOUT_S: Final = 5.0
_HEADERS: Final = {"User-Agent": f"kvxfer/{kvxfer.__version__}"}


def _sync(call: Callable[Arguments, Call[Answer]]) -> Callable[Concatenate[Client, Arguments], Answer]:
    """Makes a method from a call."""

    @wraps(call)
    def method(self: Client, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        return self.call(call(*args, **kwargs))

    return method


def _each(
    call: Callable[Arguments, Call[schema.Listed[Item]]],
) -> Callable[Concatenate[Client, Arguments], Iterator[Item]]:
    """Makes a method that yields the items of all pages of a list."""

    @wraps(call)
    def method(self: Client, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Iterator[Item]:
        page = call(*args, **kwargs)
        while True:
            listed = self.call(page)
            yield from listed.items
            if listed.next is None:
                return
            page = page.at(listed.next)

    return method


def _awaited(
    call: Callable[Arguments, Call[Answer]],
) -> Callable[Concatenate[AsyncClient, Arguments], Awaitable[Answer]]:
    """Makes a coroutine from a call."""

    @wraps(call)
    async def method(self: AsyncClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        return await self.call(call(*args, **kwargs))

    return method


def _async_each(
    call: Callable[Arguments, Call[schema.Listed[Item]]],
) -> Callable[Concatenate[AsyncClient, Arguments], AsyncIterator[Item]]:
    """Makes an asynchronous iterator over the items of all pages of a list."""

    @wraps(call)
    async def method(
        self: AsyncClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> AsyncIterator[Item]:
        page = call(*args, **kwargs)
        while True:
            listed = await self.call(page)
            for item in listed.items:
                yield item
            if listed.next is None:
                return
            page = page.at(listed.next)

    return method


class Client:
    """Asks one daemon, and waits for its answers. Several threads may use it.

    Each operation of the OpenAPI document is a method of the same name. Methods that are named after what
    they list (`transfers`, `agents`) go through all pages. For some seconds (`retry`) the client repeats a
    request that failed, if repeating is safe; POSTs carry idempotency keys.

    Parameters
    ----------
    daemon
        A URL, or a unix socket's path; None for ``KVXFER_DAEMON_URL``, else this user's own daemon.
    token
        Needed over TCP, unless a certificate takes its place. None reads it from the file that
        ``KVXFER_TOKEN_FILE`` names.
    verify
        Trusted certificates: a file's path, or True for the system's.
    certificate
        The client's certificate, if the daemon wants one: paths of the certificate and its key. None for the
        files that ``KVXFER_CERTIFICATE_FILE`` and ``KVXFER_KEY_FILE`` name.

    Raises
    ------
    UsageError
        ``invalid-argument``: `daemon` does not name a daemon, or a token's or certificate's file cannot be
        read.
    ControlError
        Raised by all methods: see there.
    """

    def __init__(
        self,
        daemon: str | os.PathLike[str] | None = None,
        *,
        token: str | None = None,
        retry: Retry | None = None,
        verify: str | bool = True,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        #: The daemon that it asks.
        self.address = DaemonAddress.parse(daemon)
        self._retry = retry or Retry()
        transport = httpx.HTTPTransport(uds=self.address.socket) if self.address.socket else None
        http = _connection(self.address, token, verify, certificate)
        self._http = httpx.Client(transport=transport, **http)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.address}>"

    def close(self) -> None:
        """Closes its connections. Idempotent."""
        self._http.close()

    def call(self, call: Call[Answer]) -> Answer:
        """Sends a call and returns its answer."""
        steps = exchange(call, self._retry, str(self.address))
        outcome: Outcome = None
        try:
            while True:
                step = steps.send(outcome)
                if isinstance(step, float):
                    time.sleep(step)
                    outcome = None
                else:
                    outcome = self._send(call, step)
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    def _send(self, call: Call[Any], headers: dict[str, str]) -> Outcome:
        try:
            return self._http.request(**_request(call, headers))
        except httpx.TransportError as error:
            return error

    def events(
        self, *, topic: Iterable[str] = (), after: int | None = None, reconnect: bool = True
    ) -> Generator[schema.Event | Missed, None, None]:
        """Yields events as they happen, without an end; if the connection breaks, opens another.

        Parameters
        ----------
        topic
            Topics, each including those below it, e.g. ``["transfers"]``; none for all.
        after
            Continue after this index; None starts now.
        reconnect
            False: raise if the connection breaks.

        Yields
        ------
        Event or Missed
            `Missed` takes the place of events that were overwritten before they could be sent.

        Raises
        ------
        ControlError
            The daemon refuses the request.
        """
        cursor = EventCursor(tuple(topic), after)
        while True:
            try:
                with self._http.stream("GET", "/v1/events", **_stream(cursor)) as response:
                    if response.status_code != 200:
                        raise ControlError.of_answer(response.status_code, response.read())
                    cursor.begin()
                    for chunk in response.iter_bytes():
                        yield from cursor.feed(chunk)
                error = ControlError(UNREACHABLE, "The daemon did not answer", "the stream ended", 0)
            except ControlError as refused:
                error = refused
            except httpx.TransportError as broken:
                error = unanswered(broken, str(self.address))
            wait_s = cursor.failed(error.status)
            if wait_s < 0 or not reconnect:
                raise error
            time.sleep(wait_s)

    # ---- by name -----------------------------------------------------------------------------------

    healthz = _sync(calls.healthz)
    readyz = _sync(calls.readyz)
    get_node = _sync(calls.get_node)
    get_topology = _sync(calls.get_topology)
    get_doctor = _sync(calls.get_doctor)
    get_metrics = _sync(calls.get_metrics)
    get_settings = _sync(calls.get_settings)
    change_settings = _sync(calls.change_settings)
    get_drain = _sync(calls.get_drain)
    begin_drain = _sync(calls.begin_drain)
    end_drain = _sync(calls.end_drain)
    list_agents = _sync(calls.list_agents)
    get_agent = _sync(calls.get_agent)
    list_agent_regions = _sync(calls.list_agent_regions)
    list_agent_peers = _sync(calls.list_agent_peers)
    connect_agent = _sync(calls.connect_agent)
    list_regions = _sync(calls.list_regions)
    list_peers = _sync(calls.list_peers)
    list_rails = _sync(calls.list_rails)
    create_transfer = _sync(calls.create_transfer)
    list_transfers = _sync(calls.list_transfers)
    list_open_transfers = _sync(calls.list_open_transfers)
    get_transfer = _sync(calls.get_transfer)
    get_request_trace = _sync(calls.get_request_trace)
    get_perfetto_trace = _sync(calls.get_perfetto_trace)
    add_spans = _sync(calls.add_spans)
    delete_transfer = _sync(calls.delete_transfer)
    cancel_transfer = _sync(calls.cancel_transfer)
    list_leases = _sync(calls.list_leases)
    grant_lease = _sync(calls.grant_lease)
    extend_lease = _sync(calls.extend_lease)
    revoke_lease = _sync(calls.revoke_lease)
    list_pages = _sync(calls.list_pages)
    list_pools = _sync(calls.list_pools)
    park_pages = _sync(calls.park_pages)
    fetch_pages = _sync(calls.fetch_pages)
    lease_pages = _sync(calls.lease_pages)
    extend_page_lease = _sync(calls.extend_page_lease)
    revoke_page_lease = _sync(calls.revoke_page_lease)
    pin_pages = _sync(calls.pin_pages)
    unpin_pages = _sync(calls.unpin_pages)
    drop_pages = _sync(calls.drop_pages)
    whoami = _sync(calls.whoami)
    list_tokens = _sync(calls.list_tokens)
    create_token = _sync(calls.create_token)
    revoke_token = _sync(calls.revoke_token)
    list_events = _sync(calls.list_events)
    list_entries = _sync(calls.list_entries)
    publish_entry = _sync(calls.publish_entry)
    keep_entries = _sync(calls.keep_entries)
    withdraw_entry = _sync(calls.withdraw_entry)

    agents = _each(calls.list_agents)
    regions = _each(calls.list_regions)
    peers = _each(calls.list_peers)
    rails = _each(calls.list_rails)
    transfers = _each(calls.list_transfers)
    leases = _each(calls.list_leases)
    pages = _each(calls.list_pages)
    tokens = _each(calls.list_tokens)


class AsyncClient:
    """Like `Client`, for one event loop: methods are coroutines, and lists are asynchronous iterators."""

    def __init__(
        self,
        daemon: str | os.PathLike[str] | None = None,
        *,
        token: str | None = None,
        retry: Retry | None = None,
        verify: str | bool = True,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        #: The daemon that it asks.
        self.address = DaemonAddress.parse(daemon)
        self._retry = retry or Retry()
        transport = httpx.AsyncHTTPTransport(uds=self.address.socket) if self.address.socket else None
        http = _connection(self.address, token, verify, certificate)
        self._http = httpx.AsyncClient(transport=transport, **http)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.address}>"

    async def aclose(self) -> None:
        """Closes its connections. Idempotent."""
        await self._http.aclose()

    async def call(self, call: Call[Answer]) -> Answer:
        """Sends a call and returns its answer."""
        steps = exchange(call, self._retry, str(self.address))
        outcome: Outcome = None
        try:
            while True:
                step = steps.send(outcome)
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    outcome = None
                else:
                    outcome = await self._send(call, step)
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    async def _send(self, call: Call[Any], headers: dict[str, str]) -> Outcome:
        try:
            return await self._http.request(**_request(call, headers))
        except httpx.TransportError as error:
            return error

    async def events(
        self, *, topic: Iterable[str] = (), after: int | None = None, reconnect: bool = True
    ) -> AsyncGenerator[schema.Event | Missed, None]:
        """Like `Client.events`."""
        cursor = EventCursor(tuple(topic), after)
        while True:
            try:
                async with self._http.stream("GET", "/v1/events", **_stream(cursor)) as response:
                    if response.status_code != 200:
                        raise ControlError.of_answer(response.status_code, await response.aread())
                    cursor.begin()
                    async for chunk in response.aiter_bytes():
                        for event in cursor.feed(chunk):
                            yield event
                error = ControlError(UNREACHABLE, "The daemon did not answer", "the stream ended", 0)
            except ControlError as refused:
                error = refused
            except httpx.TransportError as broken:
                error = unanswered(broken, str(self.address))
            wait_s = cursor.failed(error.status)
            if wait_s < 0 or not reconnect:
                raise error
            await asyncio.sleep(wait_s)

    # ---- by name -----------------------------------------------------------------------------------

    healthz = _awaited(calls.healthz)
    readyz = _awaited(calls.readyz)
    get_node = _awaited(calls.get_node)
    get_topology = _awaited(calls.get_topology)
    get_doctor = _awaited(calls.get_doctor)
    get_metrics = _awaited(calls.get_metrics)
    get_settings = _awaited(calls.get_settings)
    change_settings = _awaited(calls.change_settings)
    get_drain = _awaited(calls.get_drain)
    begin_drain = _awaited(calls.begin_drain)
    end_drain = _awaited(calls.end_drain)
    list_agents = _awaited(calls.list_agents)
    get_agent = _awaited(calls.get_agent)
    list_agent_regions = _awaited(calls.list_agent_regions)
    list_agent_peers = _awaited(calls.list_agent_peers)
    connect_agent = _awaited(calls.connect_agent)
    list_regions = _awaited(calls.list_regions)
    list_peers = _awaited(calls.list_peers)
    list_rails = _awaited(calls.list_rails)
    create_transfer = _awaited(calls.create_transfer)
    list_transfers = _awaited(calls.list_transfers)
    list_open_transfers = _awaited(calls.list_open_transfers)
    get_transfer = _awaited(calls.get_transfer)
    get_request_trace = _awaited(calls.get_request_trace)
    get_perfetto_trace = _awaited(calls.get_perfetto_trace)
    add_spans = _awaited(calls.add_spans)
    delete_transfer = _awaited(calls.delete_transfer)
    cancel_transfer = _awaited(calls.cancel_transfer)
    list_leases = _awaited(calls.list_leases)
    grant_lease = _awaited(calls.grant_lease)
    extend_lease = _awaited(calls.extend_lease)
    revoke_lease = _awaited(calls.revoke_lease)
    list_pages = _awaited(calls.list_pages)
    list_pools = _awaited(calls.list_pools)
    park_pages = _awaited(calls.park_pages)
    fetch_pages = _awaited(calls.fetch_pages)
    lease_pages = _awaited(calls.lease_pages)
    extend_page_lease = _awaited(calls.extend_page_lease)
    revoke_page_lease = _awaited(calls.revoke_page_lease)
    pin_pages = _awaited(calls.pin_pages)
    unpin_pages = _awaited(calls.unpin_pages)
    drop_pages = _awaited(calls.drop_pages)
    whoami = _awaited(calls.whoami)
    list_tokens = _awaited(calls.list_tokens)
    create_token = _awaited(calls.create_token)
    revoke_token = _awaited(calls.revoke_token)
    list_events = _awaited(calls.list_events)
    list_entries = _awaited(calls.list_entries)
    publish_entry = _awaited(calls.publish_entry)
    keep_entries = _awaited(calls.keep_entries)
    withdraw_entry = _awaited(calls.withdraw_entry)

    agents = _async_each(calls.list_agents)
    regions = _async_each(calls.list_regions)
    peers = _async_each(calls.list_peers)
    rails = _async_each(calls.list_rails)
    transfers = _async_each(calls.list_transfers)
    leases = _async_each(calls.list_leases)
    pages = _async_each(calls.list_pages)
    tokens = _async_each(calls.list_tokens)


def _connection(
    address: DaemonAddress, token: str | None, verify: str | bool, certificate: tuple[str, str] | None
) -> dict[str, Any]:
    """Returns what both kinds of client tell httpx."""
    if token is None and not address.socket:
        token = token_of()
    return {
        "base_url": address.url,
        "headers": _HEADERS if token is None else {**_HEADERS, "Authorization": f"Bearer {token}"},
        "verify": _tls(verify, certificate) if address.url.startswith("https:") else False,
        "timeout": _CONNECT_TIMEOUT_S,
        "trust_env": False,
    }


def _tls(verify: str | bool, certificate: tuple[str, str] | None) -> Any:
    import ssl

    certificate = certificate or certificate_of()
    try:
        context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
        if certificate is not None:
            context.load_cert_chain(*certificate)
    except OSError as error:  # SSLError among them
        raise invalid(f"certificates cannot be read ({verify}, {certificate}): {error}") from None
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _request(call: Call[Any], headers: dict[str, str]) -> dict[str, Any]:
    kind = {} if call.body is None else {"Content-Type": "application/json"}
    return {
        "method": call.method,
        "url": call.path,
        "params": list(call.params),
        "content": call.body,
        "headers": {**headers, **kind, **call.headers},
        "timeout": httpx.Timeout(_CONNECT_TIMEOUT_S, read=call.timeout_s),
    }


def _stream(cursor: EventCursor) -> dict[str, Any]:
    return {"params": cursor.params, "timeout": httpx.Timeout(_CONNECT_TIMEOUT_S, read=SILENT_S)}
