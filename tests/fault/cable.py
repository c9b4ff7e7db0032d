"""Two hosts, as far as one machine has them: network namespaces, and a cable between them that can be cut.

Each host has a network of its own (what is said on one's loopback or abstract unix sockets the other
does not hear) and an ``/etc/hosts`` of its own. Needs root, and iproute2 and util-linux. All of it
ends with the two processes that hold it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.fault.node import Worker

_TOOLS: Final = ("ip", "tc", "nsenter", "unshare", "mount")
_numbers = itertools.count()


def why_not() -> str:
    """Returns why there can be no cable here; "" where there can be."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"no {' and no '.join(missing)} (iproute2, util-linux)"
    done = subprocess.run(
        ["unshare", "-nm", "ip", "link", "add", "here", "type", "veth", "peer", "name", "there"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else f"no network namespace with a veth: {done.stderr.strip()}"


class Host:
    """One end of the cable."""

    def __init__(self, number: int, names: Mapping[str, tuple[str, ...]], folder: Path) -> None:
        self.ipv4, self.ipv6 = f"10.77.0.{number}", f"fd77::{number}"
        hosts = folder / f"hosts-{number}"
        lines = [f"{address} {name}\n" for name, addresses in names.items() for address in addresses]
        hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
        # Holds the namespaces; ``cat`` ends with this process, as its standard input does.
        script = f"mount --bind {hosts} /etc/hosts && ip link set lo up && echo up && exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "-nm", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"
        self._workers: list[Worker] = []

    @property
    def pid(self) -> int:
        return self._holder.pid

    def run(self, *command: str) -> None:
        """Runs a command in the host's namespaces."""
        subprocess.run([*self._inside, *command], check=True, capture_output=True)

    def node(self, name: str, *arguments: Any, **options: Any) -> Worker:
        """Starts a node there."""
        worker = Worker(name, *arguments, within=self._inside, **options)
        self._workers.append(worker)
        return worker

    @property
    def _inside(self) -> tuple[str, ...]:
        return ("nsenter", "-t", str(self.pid), "-n", "-m", f"--wd={Path.cwd()}")

    def end(self) -> None:
        for worker in self._workers:
            worker.finish()
        self._holder.kill()
        self._holder.communicate()


class Cable:
    """Two hosts and what connects them; ``with`` takes all of it down."""

    def __init__(self, names: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.here, self.there = (Host(number, names or {}, Path(self._folder.name)) for number in (1, 2))
        self._ends = {}
        number = next(_numbers)
        ends = [f"kv{os.getpid() % 100000}{side}{number}" for side in "ab"]
        subprocess.run(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], check=True)
        for end, host in zip(ends, (self.here, self.there), strict=True):
            subprocess.run(["ip", "link", "set", end, "netns", str(host.pid)], check=True)
            host.run("ip", "addr", "add", f"{host.ipv4}/24", "dev", end)
            # nodad: an address that is looked for elsewhere first cannot be listened on meanwhile.
            host.run("ip", "addr", "add", f"{host.ipv6}/64", "dev", end, "nodad")
            host.run("ip", "link", "set", end, "up")
            self._ends[host] = end

    def limit(self, mbit_s: int) -> None:
        """Lets that much through, each way."""
        for host, end in self._ends.items():
            shape = f"rate {mbit_s}mbit burst 64kb latency 50ms"
            host.run("tc", "qdisc", "replace", "dev", end, "root", "tbf", *shape.split())

    def cut(self) -> None:
        """Nothing comes through from now on, and nobody is told."""
        for host, end in self._ends.items():
            host.run("tc", "qdisc", "replace", "dev", end, "root", "tbf", *_NOTHING.split())

    def mend(self) -> None:
        """As before, without a limit."""
        for host, end in self._ends.items():
            host.run("tc", "qdisc", "del", "dev", end, "root")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.here.end()
        self.there.end()
        self._folder.cleanup()


# Every packet is larger than the bucket, and dropped.
_NOTHING: Final = "rate 8kbit burst 1b limit 1b"
