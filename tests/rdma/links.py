"""The machine's two devices, the link between them, and faults of that link; for programs in the machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class Device:
    """A Soft-RoCE device, one end of the link."""

    name: str
    interface: str
    address: str

    #: The index of the GID of ``address``, RoCE v2 as all of Soft-RoCE's; index 0 is the link-local one.
    gid_index: int = 1

    def state(self) -> str:
        """Returns the port's state in the kernel's words, e.g. ``"4: ACTIVE"``."""
        return self._port("state")

    def gid(self, index: int) -> str:
        return self._port(f"gids/{index}")

    def gid_type(self, index: int) -> str:
        return self._port(f"gid_attrs/types/{index}")

    def sent_nbytes(self) -> int:
        """Returns what has gone out on the link since the boot."""
        return int(Path(f"/sys/class/net/{self.interface}/statistics/tx_bytes").read_text())

    def counter(self, name: str) -> int:
        """Returns one of the port's counters, e.g. ``duplicate_request``."""
        return int(self._port(f"hw_counters/{name}"))

    def _port(self, what: str) -> str:
        return Path(f"/sys/class/infiniband/{self.name}/ports/1/{what}").read_text().strip()


RXE0: Final = Device("rxe0", "veth0", "10.99.0.1")
RXE1: Final = Device("rxe1", "veth1", "10.99.0.2")


@contextmanager
def lossy(device: Device, percent: float = 100.0) -> Iterator[None]:
    """Drops packets that the device sends; the ports stay active. All of them look like a peer that died."""
    with _netem(device, f"loss {percent}%"):
        yield


@contextmanager
def disordered(device: Device, percent: float = 1.0, loss_percent: float = 1.0) -> Iterator[None]:
    """Sends so many of the device's packets before earlier ones, and drops some.

    Each costs Soft-RoCE a retry, and a queue pair has six at most for all packets of a piece of work.
    """
    with _netem(device, f"delay 2ms reorder {percent}% loss {loss_percent}%"):
        yield


@contextmanager
def down(device: Device) -> Iterator[None]:
    """Switches an end of the link off. Both ports go down with it, as at a cable that is pulled."""
    _call(f"ip link set {device.interface} down")
    try:
        yield
    finally:
        _call(f"ip link set {device.interface} up")
        give_up = time.monotonic() + 60
        while {RXE0.state(), RXE1.state()} != {"4: ACTIVE"}:
            if time.monotonic() > give_up:
                raise TimeoutError("the ports do not become active again")
            time.sleep(0.01)


@contextmanager
def mtu(device: Device, nbytes: int) -> Iterator[None]:
    """Gives an end of the link another MTU; the port's active MTU follows. What is larger is not received."""
    path = Path(f"/sys/class/net/{device.interface}/mtu")
    before = path.read_text()
    path.write_text(f"{nbytes}")
    try:
        yield
    finally:
        path.write_text(before)


def with_memlock(nbytes: int, *command: str) -> list[str]:
    """Returns a command that may lock so much memory; root's right to lock more is taken from it."""
    privileges = ("setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", "--")
    return ["prlimit", f"--memlock={nbytes}", *privileges, *command]


@contextmanager
def _netem(device: Device, what: str) -> Iterator[None]:
    _call(f"tc qdisc add dev {device.interface} root netem limit 100000 {what}")
    try:
        yield
    finally:
        _call(f"tc qdisc del dev {device.interface} root")


def _call(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=60)
