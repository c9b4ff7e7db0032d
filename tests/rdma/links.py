"""The machine's devices, the links between them, and faults of those links. For programs in the machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.waiting import until


@dataclass(frozen=True)
class Device:
    """A Soft-RoCE device, one end of the link."""

    name: str
    interface: str
    address: str

    #: The index of the GID of ``address``. All of Soft-RoCE's GIDs are RoCE v2; index 0 is the link-local
    #: one.
    gid_index: int = 1

    def state(self) -> str:
        """Returns the port's state in the kernel's words, e.g. ``"4: ACTIVE"``."""
        return self._port("state")

    def gid(self, index: int) -> str:
        return self._port(f"gids/{index}")

    def gid_type(self, index: int) -> str:
        return self._port(f"gid_attrs/types/{index}")

    def sent_nbytes(self) -> int:
        """Returns the bytes that the device has sent on the link since the boot."""
        return self._sent("bytes")

    def sent_packets(self) -> int:
        return self._sent("packets")

    def counter(self, name: str) -> int:
        """Returns one of the port's counters, e.g. ``duplicate_request``."""
        return int(self._port(f"hw_counters/{name}"))

    def _sent(self, what: str) -> int:
        return int(Path(f"/sys/class/net/{self.interface}/statistics/tx_{what}").read_text())

    def _port(self, what: str) -> str:
        return Path(f"/sys/class/infiniband/{self.name}/ports/1/{what}").read_text().strip()


RXE0: Final = Device("rxe0", "veth0", "10.99.0.1")
RXE1: Final = Device("rxe1", "veth1", "10.99.0.2")
#: Of `second_link`.
RXE2: Final = Device("rxe2", "veth2", "10.98.0.1")
RXE3: Final = Device("rxe3", "veth3", "10.98.0.2")
#: An address in none of the machine's networks.
STRAY_ADDRESS: Final = "192.0.2.1"


def faults_seen() -> int:
    """Returns how many requests reached the first link's devices out of order or more than once."""
    names = ("out_of_seq_request", "duplicate_request")
    return sum(device.counter(name) for device in (RXE0, RXE1) for name in names)


@contextmanager
def second_link() -> Iterator[None]:
    """Adds a second link, made like the first (guest/start), with `RXE2` and `RXE3` on its ends."""
    with ExitStack() as undo:
        _call(f"ip link add {RXE2.interface} type veth peer name {RXE3.interface}")
        undo.callback(_call, f"ip link del {RXE2.interface}")
        for end, other in ((RXE2, RXE3), (RXE3, RXE2)):
            settings = Path(f"/proc/sys/net/ipv4/conf/{end.interface}")
            (settings / "accept_local").write_text("1")
            (settings / "rp_filter").write_text("0")
            _call(f"ip addr add {end.address}/24 dev {end.interface}")
            _call(f"ip link set {end.interface} mtu 9000 up")
            rule = f"pref 5 oif {end.interface} to {other.address} lookup main"
            _call(f"ip rule add {rule}")
            undo.callback(_call, f"ip rule del {rule}")
            _call(f"rdma link add {end.name} type rxe netdev {end.interface}")
            undo.callback(_call, f"rdma link delete {end.name}")
        yield


@contextmanager
def lossy(device: Device, percent: float = 100.0) -> Iterator[None]:
    """Drops packets that the device sends; the ports stay active. 100 % looks like a peer that died.

    Answers to ARP are not dropped: both ends know each other's address, as when a link dies in mid-work.
    """
    with ExitStack() as undo:
        for end, other in ((RXE0, RXE1), (RXE1, RXE0)):
            mac = Path(f"/sys/class/net/{other.interface}/address").read_text().strip()
            neighbour = f"ip neigh replace {other.address} dev {end.interface} lladdr {mac} nud"
            _call(f"{neighbour} permanent")
            undo.callback(_call, f"{neighbour} reachable")  # a second fault may be under way
        undo.enter_context(_netem(device, f"loss {percent}%"))
        yield


@contextmanager
def disordered(device: Device, percent: float = 1.0, loss_percent: float = 1.0) -> Iterator[None]:
    """Sends the given share of the device's packets before earlier ones, and drops some.

    Each of them costs Soft-RoCE a retry, and a queue pair has at most six for all packets of a request.
    """
    with _netem(device, f"delay 2ms reorder {percent}% loss {loss_percent}%"):
        yield


@contextmanager
def down(device: Device) -> Iterator[None]:
    """Switches an end of the link off. Both ports go down, as if the cable were pulled."""
    _call(f"ip link set {device.interface} down")
    try:
        yield
    finally:
        _call(f"ip link set {device.interface} up")
        until(lambda: {RXE0.state(), RXE1.state()} == {"4: ACTIVE"}, "the ports do not become active again")


@contextmanager
def mtu(device: Device, nbytes: int) -> Iterator[None]:
    """Gives an end of the link another MTU, which the port follows. Larger packets are not received."""
    path = Path(f"/sys/class/net/{device.interface}/mtu")
    before = path.read_text()
    path.write_text(f"{nbytes}")
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def narrow(device: Device, nbytes: int) -> Iterator[None]:
    """Drops larger packets on their way to the device, like a switch with a smaller MTU."""
    _call(f"tc qdisc add dev {device.interface} ingress")
    try:
        _call(
            f"tc filter add dev {device.interface} ingress matchall"
            f" action police mtu {nbytes} conform-exceed drop"
        )
        yield
    finally:
        _call(f"tc qdisc del dev {device.interface} ingress")


@contextmanager
def stray_address(device: Device, other: Device, *, is_answered: bool) -> Iterator[int]:
    """Gives a device another address, which the other end cannot reach; yields its GID's index.

    Either no station answers for the address there, so that a connection is refused; or a station that does
    not exist does, so that packets are lost. (No rule or route refuses the address: if packets must leave by
    one interface, the kernel assumes that any address is behind it.)
    """
    index, neighbour = 2, f"{STRAY_ADDRESS} dev {other.interface}"
    with ExitStack() as undo:
        if not is_answered:
            asked = Path(f"/proc/sys/net/ipv4/conf/{device.interface}/arp_ignore")
            asked.write_text("8")
            undo.callback(asked.write_text, "0")
        else:
            _call(f"ip neigh replace {neighbour} lladdr 02:00:00:00:00:99 nud permanent")
        undo.callback(_call, f"ip neigh flush to {STRAY_ADDRESS}")
        _call(f"ip addr add {STRAY_ADDRESS}/32 dev {device.interface}")
        undo.callback(_call, f"ip addr del {STRAY_ADDRESS}/32 dev {device.interface}")
        until(lambda: device.gid(index).endswith("c000:0201"), "the address gets no GID")
        yield index


def with_memlock(nbytes: int, *command: str) -> list[str]:
    """Returns a command that may lock this much memory, without root's right to lock more."""
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
    subprocess.run(command.split(), check=True, timeout=200)
