"""Two hosts, as far as one machine has them: network namespaces, and a cable between them that can be cut.

Each host has its own network, including loopback and abstract unix sockets, and its own ``/etc/hosts``. This
needs root, iproute2 and util-linux. Everything ends with the two processes that hold the namespaces.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvxfer.bench.cluster import hosts
from tests.fault import confinement
from tests.fault.node import Worker

_numbers = itertools.count()


def why_not() -> str:
    """Returns why there can be no cable here; "" where one was laid and carried a byte."""
    if missing := hosts.missing():
        return missing
    try:
        with Cable() as cable:
            cable.limit(100)
            cable.cut()
            cable.mend()
            cable.carry()
    except subprocess.CalledProcessError as error:
        return f"{' '.join(map(str, error.cmd))}: {error.stderr}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


class Host(hosts.Host):
    """One end of the cable."""

    def __init__(self, number: int, names: Mapping[str, tuple[str, ...]], folder: Path) -> None:
        self.ipv4, self.ipv6 = f"10.77.0.{number}", f"fd77::{number}"
        self._workers: list[Worker] = []
        super().__init__(names, folder)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command there, with its output on a pipe."""
        return subprocess.Popen([*self.inside, *command], stdout=subprocess.PIPE, text=True)

    def node(self, name: str, *arguments: Any, **options: Any) -> Worker:
        """Starts a node there."""
        worker = Worker(name, *arguments, first=partial(confinement.enter, self.pid), **options)
        self._workers.append(worker)
        return worker

    def end(self) -> None:
        for worker in self._workers:
            worker.finish()
        super().end()


class Cable:
    """Two hosts and the cable between them; ``with`` removes all of it."""

    def __init__(self, names: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._hosts: list[Host] = []
        self._ends: dict[Host, str] = {}
        try:
            for number in (1, 2):
                self._hosts.append(Host(number, names or {}, Path(self._folder.name)))
            self._connect()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    @property
    def here(self) -> Host:
        return self._hosts[0]

    @property
    def there(self) -> Host:
        return self._hosts[1]

    def _connect(self) -> None:
        number = next(_numbers)
        ends = [f"kv{os.getpid() % 100000}{side}{number}" for side in "ab"]
        hosts.ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, host in zip(ends, (self.here, self.there), strict=True):
            host.plug(end, f"{host.ipv4}/24", f"{host.ipv6}/64")
            self._ends[host] = end

    def limit(self, mbit_s: int) -> None:
        """Limits the rate in each direction."""
        for host, end in self._ends.items():
            host.limit(end, mbit_s)

    def cut(self) -> None:
        """Drops all packets from now on, without an error at either end."""
        for host, end in self._ends.items():
            host.run("tc", "qdisc", "replace", "dev", end, "root", "tbf", *_NOTHING.split())

    def mend(self) -> None:
        """Restores the cable, without a rate limit."""
        for host, end in self._ends.items():
            host.run("tc", "qdisc", "del", "dev", end, "root")

    def carry(self) -> None:
        """Sends a byte from here to there with plain sockets."""
        listens = (
            "import socket; s = socket.create_server(('', 7)); print(1, flush=True); s.accept()[0].recv(1)"
        )
        sends = f"import socket; socket.create_connection(('{self.there.ipv4}', 7), 50).send(b'x')"
        with self.there.start(sys.executable, "-c", listens) as listener:
            try:
                assert listener.stdout is not None
                listener.stdout.readline()
                self.here.run(sys.executable, "-c", sends)
                listener.wait(60)
            finally:
                listener.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts:
            host.end()
        self._folder.cleanup()


# Every packet is larger than the bucket, and dropped.
_NOTHING: Final = "rate 8kbit burst 1b limit 1b"
