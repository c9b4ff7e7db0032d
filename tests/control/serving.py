"""A daemon in this process or in another, and its clients."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from kvxfer.control.daemon.node import NodeDaemon
from kvxfer.control.serve import ServeOptions, serve
from tests.fork_server import Forked

BOUND_S = 60.0
# Requests that pass their schemas.
DIGEST = "0" * 64
SALT = {"model": "m", "keys": ["k"]}
MOVE = {
    "agent": "a",
    "region": "kv",
    "remote_agent": "b",
    "remote_region": "kv",
    "src_blocks": [1],
    "dst_blocks": [2],
}


def options(folder: Path, **more: object) -> ServeOptions:
    """Options of a daemon on any free port, without its own agent."""
    plain = ServeOptions(
        state=folder / "state",
        runtime=folder / "run",
        node="node-a",
        listen="127.0.0.1:0",
        own_agent=False,
        stop_after_s=1.0,
        rate=1e6,
        burst=1e6,
    )
    return replace(plain, **more)  # type: ignore[arg-type]


@dataclass
class Served:
    """A daemon that serves in this process.

    Attributes
    ----------
    url
        Of its TCP listener.
    socket
        Its unix socket.
    token
        The first admin's.
    """

    daemon: NodeDaemon
    url: str
    socket: Path
    token: str
    said: list[str] = field(default_factory=list)

    def unix(self, token: str | None = None) -> httpx.AsyncClient:
        """Returns a client over the unix socket: this user, unless a token is given."""
        return _client("http://node", token, httpx.AsyncHTTPTransport(uds=str(self.socket), verify=False))

    def tcp(self, token: str | None = None) -> httpx.AsyncClient:
        """Returns a client over TCP. Without certificates, which take long to read."""
        return _client(self.url, token, httpx.AsyncHTTPTransport(verify=False))

    async def until_watched(self, streams: int) -> None:
        """Waits until this number of event streams is open."""
        async with asyncio.timeout(BOUND_S), self.unix() as client:
            while True:
                if f"kvxfer_daemon_watchers {float(streams)}\n" in (await client.get("/metrics")).text:
                    return
                await asyncio.sleep(0.01)

    async def make_token(self, role: str, **more: object) -> str:
        """Returns the secret of a new token."""
        async with self.unix() as client:
            answer = await client.post("/v1/tokens", json={"name": role, "role": role, **more})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["secret"])


def _client(url: str, token: str | None, transport: httpx.AsyncBaseTransport) -> httpx.AsyncClient:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=url, headers=headers, transport=transport, timeout=BOUND_S)


def read_token(folder: Path) -> str:
    """Returns the token's secret that a daemon's first start wrote."""
    return (folder / "state/admin.token").read_text().strip()


@asynccontextmanager
async def serving(folder: Path, **more: object) -> AsyncIterator[Served]:
    """Serves on the running loop."""
    said: list[str] = []
    stop = asyncio.Event()
    ready: asyncio.Future[NodeDaemon] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(options(folder, **more), stop, said.append, ready.set_result))
    try:
        both: list[asyncio.Future[Any]] = [task, ready]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED, timeout=BOUND_S)
        if task.done():
            await task
        daemon = ready.result()
        url = next(found[0] for words in said if (found := re.search(r"https?://\S+(?=,)", words)))
        yield Served(daemon, url, folder / "run/api.sock", read_token(folder), said)
    finally:
        stop.set()
        await asyncio.wait_for(task, BOUND_S)


def says_ready(line: str) -> bool:
    """Returns whether a line of the daemon's log, plain or JSON, says that it serves, ready or not."""
    return re.search(r' INFO (ready$|not ready: )|"message": "(ready"|not ready: )', line) is not None


def reasons_of(client: httpx.Client) -> set[str]:
    """Returns the reasons that the gauge has, after a comparison with the gauge of readiness."""
    text = client.get("/metrics").text
    found = set(re.findall(r'^kvxfer_daemon_not_ready{reason="(.+)"} 1.0$', text, re.MULTILINE))
    assert f"kvxfer_daemon_ready {float(not found)}" in text
    return found


@dataclass
class Program:
    """A daemon in another process."""

    process: subprocess.Popen[Any]
    folder: Path
    url: str
    said: list[str]

    @property
    def token(self) -> str:
        """The first admin's."""
        return read_token(self.folder)

    def client(self, token: str | None = None) -> httpx.Client:
        """Returns a client over TCP."""
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token or self.token}"}, timeout=BOUND_S
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal, and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(BOUND_S)


_PROGRAM = "import sys; from kvxfer.cli import main; sys.exit(main())"


@contextmanager
def program(
    folder: Path,
    *arguments: str,
    agent: bool = False,
    under: tuple[str, ...] = (),
) -> Iterator[Program]:
    """Runs ``kvxfer serve`` until the block ends: a fork, unless it is `under` a command that becomes it."""
    told = ["serve", "--state", str(folder / "state"), "--runtime", str(folder / "run"), "--node", "node-a"]
    told += ["--listen", "127.0.0.1:0", *([] if agent else ["--no-agent"]), *arguments]
    process: subprocess.Popen[Any]
    if under:
        command = [*under, sys.executable, "-m", "kvxfer", *told]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    else:
        process = Forked(_PROGRAM, *told, engine="tests.control.forked", stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    # A full pipe would block the daemon.
    rest = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    try:
        for line in process.stderr:
            said.append(line.strip())
            if says_ready(said[-1]):
                break
        else:
            raise AssertionError(f"it did not start: {said}")
        rest.start()
        url = next(found[0] for words in said if (found := re.search(r"https?://\S+(?=,)", words)))
        yield Program(process, folder, url, said)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(BOUND_S)
        if rest.is_alive():
            rest.join(BOUND_S)
        process.stderr.close()
