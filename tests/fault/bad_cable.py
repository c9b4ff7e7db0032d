"""A cable that loses, duplicates, reorders and alters packets, by a seed.

Its ends are TUN devices, which any kernel has; a thread carries packets from one to the other.
"""

from __future__ import annotations

import os
import random
import select
import socket
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.fault.cable import Cable, Host

# Run in a host's namespaces: makes the device there, and passes its descriptor.
_OPENS: Final = """
import fcntl, os, socket, struct, sys
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH", b"kv0", 0x1001))  # TUNSETIFF: IFF_TUN | IFF_NO_PI
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"tun"], [tun])
"""
_PACKET_NBYTES: Final = 1 << 16
# A late packet is overtaken by at most this many packets, and waits for them at most this long.
_OVERTAKEN_BY, _LATE_MS = 8, 10


@dataclass(frozen=True)
class Ills:
    """The rates at which a packet suffers each kind of damage."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    #: A bit is flipped, which TCP's checksum finds.
    spoilt: float = 0.0
    #: Two words of the payload are swapped, which TCP's checksum does not find.
    altered: float = 0.0


class BadCable(Cable):
    """Perfect at first; `ills` may be set at any time. `counts` counts packets by kind of damage."""

    def __init__(self, seed: int) -> None:
        self.ills = Ills()
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._devices: list[int] = []
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._carry)
        super().__init__()

    def _connect(self) -> None:
        for host in (self.here, self.there):
            self._devices.append(_open_device(host))
            host.run("ip", "addr", "add", f"{host.ipv4}/24", "dev", "kv0")
            host.run("ip", "link", "set", "kv0", "up")
        self._thread.start()

    def _carry(self) -> None:
        poller = select.poll()
        for fd in (*self._devices, self._stop):
            poller.register(fd, select.POLLIN)
        # By destination device: how many packets may still overtake a packet, and the packet.
        late: dict[int, list[tuple[int, bytes]]] = {fd: [] for fd in self._devices}
        opposite = dict(zip(self._devices, reversed(self._devices), strict=True))
        while True:
            ready = [fd for fd, _ in poller.poll(_LATE_MS if any(late.values()) else None)]
            if self._stop in ready:
                return
            if not ready:
                for fd, waiting in late.items():
                    for _, packet in waiting:
                        _put(fd, packet)
                    waiting.clear()
            for fd in ready:
                to = opposite[fd]
                packet = os.read(fd, _PACKET_NBYTES)
                for each in self._treated(packet):
                    if self._befalls("late", self.ills.late):
                        late[to].append((self._random.randrange(1, _OVERTAKEN_BY), each))
                    else:
                        _put(to, each)
                        late[to] = [(left - 1, held) for left, held in late[to]]
                for left, held in late[to]:
                    if left <= 0:
                        _put(to, held)
                late[to] = [entry for entry in late[to] if entry[0] > 0]

    def _treated(self, packet: bytes) -> list[bytes]:
        """Returns what arrives for a packet: nothing, the packet or an altered one, or two packets."""
        ills = self.ills
        if self._befalls("lost", ills.lost):
            return []
        if self._befalls("spoilt", ills.spoilt):
            at = self._random.randrange(len(packet))
            packet = packet[:at] + bytes([packet[at] ^ 1 << self._random.randrange(8)]) + packet[at + 1 :]
        if ills.altered and self._random.random() < ills.altered:
            packet = self._altered(packet)
        return [packet] * (2 if self._befalls("doubled", ills.doubled) else 1)

    def _befalls(self, what: str, rate: float) -> bool:
        if not rate or self._random.random() >= rate:
            return False
        self.counts[what] += 1
        return True

    def _altered(self, packet: bytes) -> bytes:
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return packet
        segment = 4 * (packet[0] & 15)
        payload = segment + 4 * (packet[segment + 12] >> 4)
        words = (len(packet) - payload) // 2
        if words < 2:
            return packet
        one, other = (payload + 2 * at for at in sorted(self._random.sample(range(words), 2)))
        first, second = packet[one : one + 2], packet[other : other + 2]
        if first != second:
            self.counts["altered"] += 1
        return packet[:one] + second + packet[one + 2 : other] + first + packet[other + 2 :]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            os.write(self._stopped, b"x")
            self._thread.join()
        for fd in (*self._devices, self._stop, self._stopped):
            os.close(fd)
        super().__exit__(kind, error, trace)


def _open_device(host: Host) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        host.run(sys.executable, "-c", _OPENS, str(theirs.fileno()), pass_fds=(theirs.fileno(),))
        _, (fd,), _, _ = socket.recv_fds(ours, 8, 1)
    os.set_blocking(fd, False)
    return fd


def _put(fd: int, packet: bytes) -> None:
    try:
        os.write(fd, packet)
    except OSError:
        pass  # the kernel takes no packet whose header was spoilt, or none now: it is lost


def why_not() -> str:
    """Returns why there can be no bad cable here; it needs a cable and a TUN device."""
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        BadCable(0).__exit__(None, None, None)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(map(str, error.cmd))}: {error.stderr}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""
