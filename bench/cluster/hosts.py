"""Hosts on one machine: namespaces of network, mounts and host name, and cables to one switch.

Each host has a network, a name and an ``/etc/hosts`` of its own. Needs root, iproute2 and util-linux. All of
it ends with this process, whatever ends that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_TOOLS: Final = ("ip", "tc", "nsenter", "unshare", "mount")
# A private one, which engines dial without being told. This machine has a route to it meanwhile.
_NETWORK: Final = "10.218.77"
#: Of this machine among them.
OUTSIDE: Final = f"{_NETWORK}.254"


def missing() -> str:
    """Returns what keeps hosts from being made here; "" where all is there."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"no {' and no '.join(lacking)} (iproute2, util-linux)"
    return ""


class Host:
    """One host, as yet without a cable.

    Parameters
    ----------
    hosts
        The addresses of its ``/etc/hosts`` by name.
    folder
        Takes that file.
    name
        What it is called; "" for this machine's name.
    """

    def __init__(self, hosts: Mapping[str, Sequence[str]], folder: Path, name: str = "") -> None:
        file = folder / f"hosts-{name or len(list(folder.glob('hosts-*')))}"
        lines = [f"{address} {each}\n" for each, addresses in hosts.items() for address in addresses]
        file.write_text("127.0.0.1 localhost\n" + "".join(lines))
        named = f"hostname {name} && " if name else ""
        # Holds the namespaces; ``cat`` ends with this process, as its standard input does.
        script = f"mount --bind {file} /etc/hosts && {named}ip link set lo up && echo up && exec cat"
        self._kinds = ("-n", "-m", "-u") if name else ("-n", "-m")
        self._holder = subprocess.Popen(
            ["unshare", *self._kinds, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "up\n":
            self.end()
            raise OSError("its namespaces cannot be made, or nothing can be mounted in them")

    @property
    def pid(self) -> int:
        """Of the process that holds the namespaces."""
        return self._holder.pid

    @property
    def inside(self) -> tuple[str, ...]:
        """What a command begins with that runs there; it becomes that command, with this process's folder."""
        enter = shutil.which("nsenter") or "nsenter"
        return (enter, "-t", str(self.pid), *self._kinds, f"--wd={Path.cwd()}")

    def run(self, *command: str, pass_fds: tuple[int, ...] = ()) -> None:
        """Runs a command there, to its end."""
        subprocess.run(
            [*self.inside, *command],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            pass_fds=pass_fds,
        )

    def plug(self, end: str, *addresses: str, name: str = "") -> None:
        """Takes an end of a cable from this machine, and gives it addresses (``"10.0.0.1/24"``)."""
        ip("link", "set", end, "netns", str(self.pid))
        if name:
            self.run("ip", "link", "set", end, "name", name)
        for address in addresses:
            # nodad: an address that is looked for elsewhere first cannot be listened on meanwhile.
            how = ("nodad",) if ":" in address else ()
            self.run("ip", "addr", "add", address, "dev", name or end, *how)
        self.run("ip", "link", "set", name or end, "up")

    def limit(self, end: str, mbit_s: int) -> None:
        """Lets that much out."""
        shape = f"rate {mbit_s}mbit burst 64kb latency 50ms"
        self.run("tc", "qdisc", "replace", "dev", end, "root", "tbf", *shape.split())

    def end(self) -> None:
        """Ends it; what runs there goes on without a network."""
        self._holder.kill()
        self._holder.communicate()


def ip(*arguments: str) -> None:
    """Runs iproute2's ``ip`` on this machine."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=60)


class Network:
    """Hosts by name at one switch, and this machine at it as well; ``with`` takes all of it down.

    The first host has the switch. Other names of a host are those of `aliases`.
    """

    def __init__(
        self, names: Sequence[str], aliases: Mapping[str, str] | None = None, mbit_s: int = 0
    ) -> None:
        self.addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, 1)}
        known = {name: [address] for name, address in self.addresses.items()}
        known |= {alias: known[name] for alias, name in (aliases or {}).items()}
        self._folder = tempfile.TemporaryDirectory(prefix="kvxfer-hosts-")
        self.hosts: dict[str, Host] = {}
        try:
            for name in names:
                self.hosts[name] = Host(known, Path(self._folder.name), name)
            self._connect(names[0], mbit_s)
        except BaseException:
            self.close()
            raise

    def _connect(self, center: str, mbit_s: int) -> None:
        switch = self.hosts[center]
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "addr", "add", f"{self.addresses[center]}/24", "dev", "switch")
        switch.run("ip", "link", "set", "switch", "up")
        mark = os.getpid() % 100_000
        for number, name in enumerate((*list(self.hosts)[1:], "")):
            far, near = f"kx{mark}a{number}", f"kx{mark}b{number}"
            ip("link", "add", far, "type", "veth", "peer", "name", near)
            switch.plug(near)
            switch.run("ip", "link", "set", near, "master", "switch")
            if not name:  # this machine's own
                ip("addr", "add", f"{OUTSIDE}/24", "dev", far)
                ip("link", "set", far, "up")
                continue
            self.hosts[name].plug(far, f"{self.addresses[name]}/24", name="eth0")
            if mbit_s:
                self.hosts[name].limit("eth0", mbit_s)

    def close(self) -> None:
        """Ends the hosts; cables and switch go with them. Idempotent."""
        for host in self.hosts.values():
            host.end()
        self.hosts.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
