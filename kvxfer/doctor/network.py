"""Network interfaces, and what the kernel lets sockets buffer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvxfer.doctor.files import binary_size, names_in, read_int, read_text
from kvxfer.doctor.finding import Finding, State

SUBJECT = "network"

# What a unix stream asks for (native/transports/stream/stream_transport.cpp).
_UNIX_BUFFER_NBYTES = 512 << 10
# 4 MiB: 100 Gb/s x 150 us of round trip, twice, for half of a buffer is window. Linux's default.
_TCP_BUFFER_NBYTES = 4 << 20
# Below this (1.25 GB/s) a network is slower than one tcp rail on one core.
_FAST_MBIT_PER_S = 10_000
_JUMBO_MTU = 9000
_IFF_UP = 1


@dataclass(frozen=True, slots=True)
class Nic:
    """One network interface; what the kernel does not report is None or ``""``."""

    name: str
    state: str
    mbit_per_s: int | None
    mtu: int | None
    numa_node: int | None
    driver: str
    physical: bool

    def __str__(self) -> str:
        speed = f"{self.mbit_per_s / 1000:g} Gb/s" if self.mbit_per_s else "speed unknown"
        words = [self.state, speed]
        if self.mtu is not None:
            words.append(f"MTU {self.mtu}")
        if self.driver:
            words.append(f"driver {self.driver}")
        if self.numa_node is not None:
            words.append(f"NUMA node {self.numa_node}")
        return ", ".join(words)


def nics(root: Path) -> list[Nic]:
    """Returns every interface but the loopback one."""
    found = []
    for name in names_in(root / "sys/class/net"):
        folder = root / "sys/class/net" / name
        if name == "lo" or not folder.is_dir():  # bonding_masters is a file
            continue
        speed, node = read_int(folder / "speed"), read_int(folder / "device/numa_node")
        driver = folder / "device/driver"
        found.append(
            Nic(
                name=name,
                state=read_text(folder / "operstate") or "state unknown",
                mbit_per_s=speed if speed is not None and speed > 0 else None,
                mtu=read_int(folder / "mtu"),
                numa_node=node if node is not None and node >= 0 else None,
                driver=driver.resolve().name if driver.exists() else "",
                physical=(folder / "device").exists(),
            )
        )
    return found


def examine(root: Path) -> list[Finding]:
    """Reads the interfaces and the socket buffers."""
    return [*interfaces(root), loopback(root), tcp_buffers(root), unix_buffers(root)]


def interfaces(root: Path) -> list[Finding]:
    """Says what each network card offers; virtual interfaces share one finding."""
    everyone = nics(root)
    findings = [_card(nic) for nic in everyone if nic.physical]
    others = [nic for nic in everyone if not nic.physical]
    if others:
        found = "; ".join(f"{nic.name}: {nic}" for nic in others)
        why = "a container's own interface is one of these; the card behind it decides the speed"
        findings.append(Finding(SUBJECT, "virtual interfaces", State.NOTE, found, why))
    if not everyone:
        found = "only the loopback interface: no other host can be reached from here"
        why = "tcp reaches other hosts through an interface; shm and unix need none"
        change = "for peers on other hosts: docker run --network=host, or a network for this namespace"
        findings.append(Finding(SUBJECT, "interfaces", State.NOTE, found, why, change))
    return findings


def _card(nic: Nic) -> Finding:
    why = "tcp's speed between hosts is at most the card's; 100 Gb/s are 12.5 GB/s"
    if nic.state == "down":
        return Finding(
            SUBJECT, nic.name, State.NOTE, str(nic), why, f"ip link set {nic.name} up, if it is needed"
        )
    if nic.mbit_per_s is None:
        return Finding(SUBJECT, nic.name, State.NOTE, str(nic), f"{why}; measure it with --peer")
    if nic.mbit_per_s < _FAST_MBIT_PER_S:
        change = "use a faster card for the cache: listen on that card's address"
        return Finding(SUBJECT, nic.name, State.LIMITS, str(nic), why, change)
    change = ""
    if nic.mtu is not None and nic.mtu < _JUMBO_MTU:
        change = f"if every switch allows it: ip link set {nic.name} mtu {_JUMBO_MTU} (less CPU per byte)"
    return Finding(SUBJECT, nic.name, State.GOOD, str(nic), why, change)


def loopback(root: Path) -> Finding:
    """Says whether the loopback interface is up."""
    why = "agents of one host connect over tcp://127.0.0.1 by default"
    text = read_text(root / "sys/class/net/lo/flags")
    try:
        up = bool(int(text or "", 16) & _IFF_UP)
    except ValueError:
        return Finding(SUBJECT, "lo", State.NOTE, "its state cannot be read", why)
    if up:
        return Finding(SUBJECT, "lo", State.GOOD, "up", why)
    return Finding(SUBJECT, "lo", State.LIMITS, "down", why, "ip link set lo up")


def tcp_buffers(root: Path) -> Finding:
    """Says how far the kernel lets a TCP socket's buffers grow; kvxfer leaves that to it."""
    why = (
        "the kernel grows the buffers of tcp rails up to these sizes; a long or fast path needs its "
        "bandwidth times its round trip"
    )
    values = {}
    for name in ("tcp_rmem", "tcp_wmem"):
        numbers = (read_text(root / "proc/sys/net/ipv4" / name) or "").split()
        if len(numbers) == 3 and numbers[2].isdecimal():
            values[name] = int(numbers[2])
    if len(values) < 2:
        found = "net.ipv4.tcp_rmem and tcp_wmem cannot be read (another network namespace?)"
        return Finding(SUBJECT, "TCP buffers", State.NOTE, found, why)
    found = ", ".join(f"{name} up to {binary_size(nbytes)}" for name, nbytes in values.items())
    small = [name for name, nbytes in values.items() if nbytes < _TCP_BUFFER_NBYTES]
    if not small:
        return Finding(SUBJECT, "TCP buffers", State.GOOD, found, why)
    change = "; ".join(f'sysctl -w net.ipv4.{name}="4096 131072 33554432"' for name in small)
    return Finding(SUBJECT, "TCP buffers", State.LIMITS, found, why, change)


def unix_buffers(root: Path) -> Finding:
    """Says whether a unix stream gets the buffers that it asks for."""
    why = (
        "a unix stream (the fallback of shm) asks for 512 KiB each way, and the kernel silently "
        "limits it to these sizes; tcp does not use them"
    )
    limits = {name: read_int(root / "proc/sys/net/core" / name) for name in ("rmem_max", "wmem_max")}
    words = [f"{name} {binary_size(nbytes)}" for name, nbytes in limits.items() if nbytes is not None]
    if len(words) < len(limits):
        found = "net.core.rmem_max and wmem_max cannot be read (another network namespace?)"
        return Finding(SUBJECT, "socket buffers", State.NOTE, found, why)
    small = [name for name, nbytes in limits.items() if nbytes is not None and nbytes < _UNIX_BUFFER_NBYTES]
    if not small:
        return Finding(SUBJECT, "socket buffers", State.GOOD, ", ".join(words), why)
    change = "; ".join(f"sysctl -w net.core.{name}=4194304" for name in small)
    return Finding(SUBJECT, "socket buffers", State.LIMITS, ", ".join(words), why, change)
