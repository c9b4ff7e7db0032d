"""Real etcd servers, for tests of directories."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.system_program import system_program
from tests.waiting import until

_BOUND_S: Final = 60.0


def free_ports(number: int) -> list[int]:
    """Returns ports of loopback that are free now, and that no connection gets as its own meanwhile."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    sockets: list[socket.socket] = []
    while len(sockets) < number:
        with contextlib.suppress(OSError):
            place = ("127.0.0.1", random.SystemRandom().randrange(10_000, max(first_ephemeral, 11_000)))
            sockets.append(socket.create_server(place))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Member:
    """One server of a cluster, that can be killed, stopped and started again.

    Parameters
    ----------
    name, peers
        Its name, and the peer URLs of all members by name.
    port
        Where clients reach it.
    host, inside
        The address that it listens on, and the command that runs it there.
    tls
        Its options for TLS towards clients.
    """

    def __init__(
        self,
        name: str,
        peers: dict[str, str],
        port: int,
        *,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
        tls: Sequence[str] = (),
    ) -> None:
        self.at = f"{host}:{port}"
        self._scheme = "https" if tls else "http"
        self._folder = tempfile.TemporaryDirectory()
        self._command = [
            *inside,
            system_program("etcd-server", "etcd"),
            f"--name={name}",
            f"--listen-client-urls={self._scheme}://{self.at}",
            f"--advertise-client-urls={self._scheme}://{self.at}",
            f"--listen-peer-urls={peers[name]}",
            f"--initial-advertise-peer-urls={peers[name]}",
            "--initial-cluster=" + ",".join(f"{each}={url}" for each, url in peers.items()),
            *tls,
        ]
        self._inside = bool(inside)
        self._process: subprocess.Popen[bytes] | None = None
        self._life = 0
        self._log = Path(self._folder.name) / "log"

    def start(self, *, empty: bool = False) -> None:
        """Starts it, with what it had or with nothing."""
        self._life += empty
        data = Path(self._folder.name) / f"data-{self._life}"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, f"--data-dir={data}"], stdout=log, stderr=subprocess.STDOUT
            )

    def until_healthy(self) -> None:
        """Waits until it answers, and its cluster has a leader."""

        def is_healthy() -> bool:
            try:
                with urllib.request.urlopen(f"http://{self.at}/health", timeout=2) as answer:
                    return bool(json.load(answer).get("health") == "true")
            except (OSError, ValueError):
                return False

        until(is_healthy, self._last_words, pause_s=0.05)

    def until_listening(self) -> None:
        """Waits until its port is open."""
        host, _, port = self.at.rpartition(":")

        def is_open() -> bool:
            try:
                socket.create_connection((host, int(port)), 2).close()
            except OSError:
                return False
            return True

        until(is_open, self._last_words, pause_s=0.05)

    def _last_words(self) -> str:
        return self._log.read_text()[-4000:]

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(_BOUND_S)
            self._process = None

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        self.kill()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


class Cluster:
    """Some members on loopback; ``with`` starts and ends them."""

    def __init__(self, size: int = 1, tls: Sequence[str] = ()) -> None:
        ports = free_ports(2 * size)
        peers = {f"m{number}": f"http://127.0.0.1:{ports[number]}" for number in range(size)}
        self.members = [
            Member(name, peers, ports[size + number], tls=tls) for number, name in enumerate(peers)
        ]
        self._tls = bool(tls)

    def url(self, prefix: str = "test") -> str:
        return f"etcd://{','.join(member.at for member in self.members)}/{prefix}"

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                member.start()
            for member in self.members:
                member.until_listening() if self._tls else member.until_healthy()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.members:
            member.end()
