"""With thousands of slow clients, other clients are answered, and descriptors are bounded."""

from __future__ import annotations

import asyncio
import errno
import resource
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvxfer.control.http.http_protocol import ACCEPTED_AT_ONCE, MOST_CONNECTIONS
from tests.control.authority import Authority
from tests.control.serving import BOUND_S, Program, program
from tests.waiting import until

#: Connections of each listener; and how many a daemon with few descriptors has.
COUNT = 1500
FEW, PLENTY = 512, 8192
OWN_FDS = 60  # of a daemon without clients

HEAD = "Host: localhost\r\nAuthorization: Bearer {token}\r\n"
BODY = "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
SLOW = {
    "nothing": "",
    "headers": "GET /v1/node HTTP/1.1\r\n" + HEAD + "X: ",
    "a body": "PUT /v1/drain HTTP/1.1\r\n" + HEAD + BODY + "{{",
    "a stranger's body": "PUT /v1/drain HTTP/1.1\r\nHost: localhost\r\n" + BODY + "{{",
    "reading events": "GET /v1/events?after=0 HTTP/1.1\r\n" + HEAD + "\r\n",
    "the next request": "GET /v1/node HTTP/1.1\r\n" + HEAD + "\r\n",
}


@pytest.fixture(autouse=True)
def many_fds() -> Iterator[None]:
    """Lets this process have as many descriptors as it may."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2 * COUNT + 500 or shutil.which("prlimit") is None:
        pytest.skip("there are too few descriptors for so many clients, or no prlimit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def num_fds(daemon: Program) -> int:
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


def places(daemon: Program) -> list[tuple[socket.AddressFamily, str | tuple[str, int]]]:
    host, port = daemon.url.rpartition("//")[2].split(":")
    unix = str(daemon.folder / "run/api.sock")
    return [(socket.AF_INET, (host, int(port))), (socket.AF_UNIX, unix)]


async def call(family: socket.AddressFamily, place: str | tuple[str, int], sent: bytes) -> socket.socket:
    """Connects, and sends as much as the daemon reads; the daemon may disconnect at any time."""
    loop = asyncio.get_running_loop()
    client = socket.socket(family)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    try:
        if family == socket.AF_INET:
            await loop.sock_connect(client, place)
        else:
            while True:
                if client.connect_ex(place) != errno.EAGAIN:
                    break
                await asyncio.sleep(0.005)  # its backlog is full, which looks like a connection to asyncio
        await loop.sock_sendall(client, sent)
    except ConnectionError:
        pass
    return client


@asynccontextmanager
async def slow_clients(daemon: Program, kind: str) -> AsyncIterator[None]:
    sent = SLOW[kind].format(token=daemon.token).encode()
    with ExitStack() as stack:
        for begin in range(0, COUNT, 100):
            for family, place in places(daemon):
                some = [call(family, place, sent) for _ in range(begin, begin + 100)]
                for client in await asyncio.gather(*some):
                    stack.enter_context(client)
        yield


@pytest.mark.parametrize("limit", [FEW, PLENTY])
@pytest.mark.parametrize("kind", SLOW)
async def test_others_are_answered_and_descriptors_bounded(tmp_path: Path, kind: str, limit: int) -> None:
    under = ("prlimit", f"--nofile={limit}:{limit}")
    with program(tmp_path, under=under) as daemon, daemon.client() as admin:
        # New connections, and those that they displaced, coexist for a moment.
        most = 2 * (min(MOST_CONNECTIONS, limit // 8) + 2 * ACCEPTED_AT_ONCE) + OWN_FDS
        token = admin.post("/v1/tokens", json={"name": "other", "role": "read"}).json()["secret"]
        async with slow_clients(daemon, kind):
            assert num_fds(daemon) <= most
            for place in ("unix", "tcp"):
                async with other_client(daemon, place, token) as client:
                    for _ in range(10):
                        assert (await client.get("/v1/node")).status_code == 200
            assert num_fds(daemon) <= most
        until(lambda: num_fds(daemon) <= OWN_FDS, "descriptors of clients that are gone stay open")
        assert not any("Traceback" in words for words in daemon.said), "".join(daemon.said[-100:])


# The first bytes of a handshake: a record of 512 bytes, of which one arrives.
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half a handshake"])
async def test_clients_whose_handshake_does_not_end_take_no_more_than_others(
    tmp_path: Path, sent: bytes
) -> None:
    issuer = Authority(tmp_path / "ca")
    cert, key = issuer.of_node()
    context = ssl.create_default_context(cafile=str(issuer.file))
    under = ("prlimit", f"--nofile={FEW}:{FEW}")
    with program(tmp_path, "--tls-certificate", cert, "--tls-key", key, under=under) as daemon:
        (at, _) = places(daemon)
        with ExitStack() as stack:
            for _ in range(0, COUNT, 100):
                for client in await asyncio.gather(*(call(*at, sent) for _ in range(100))):
                    stack.enter_context(client)
            most = FEW // 8 + 2 * ACCEPTED_AT_ONCE + OWN_FDS
            until(lambda: num_fds(daemon) <= most, "clients that are silent keep more descriptors")
            async with other_client(daemon, "unix", daemon.token) as other:
                assert (await other.get("/v1/node")).status_code == 200
            async with httpx.AsyncClient(verify=context, base_url=daemon.url, timeout=BOUND_S) as other:
                for _ in range(10):
                    assert (await other.get("/healthz")).status_code == 200
            assert num_fds(daemon) <= most
        until(lambda: num_fds(daemon) <= OWN_FDS, "descriptors of clients that are gone stay open")
        assert not any("Traceback" in words for words in daemon.said), "".join(daemon.said[-100:])


def other_client(daemon: Program, place: str, token: str) -> httpx.AsyncClient:
    path = str(daemon.folder / "run/api.sock") if place == "unix" else None
    return httpx.AsyncClient(
        base_url="http://localhost" if place == "unix" else daemon.url,
        transport=httpx.AsyncHTTPTransport(uds=path, verify=False),
        headers={"Authorization": f"Bearer {token}"},
        timeout=BOUND_S,
    )
