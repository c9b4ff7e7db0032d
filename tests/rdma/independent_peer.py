"""A peer without a line of kvxfer's code: ``independent_peer.py PORT SECRET``.

It speaks the control frames of native/core/control (described in session.h and wire.h) and the hello of
native/transports/verbs/message.h, with Python's standard library and pyverbs. So it shows that these are
enough to connect to an agent, to find its regions and to READ them. It then tries to WRITE, which peers may
not do.

Prints the SHA-256 of the agent's first region, read from device to device, and how the WRITE ended. Runs
under the distribution's interpreter, which is the only one that has pyverbs.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import sys
import threading
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

DEVICE, GID_INDEX = "rxe1", 1
VERSION = 6
HELLO, CHALLENGE, PROOF, RAIL_HELLO, RAIL_WELCOME = 1, 2, 3, 8, 9
HEARTBEAT, HEARTBEAT_ACK, REGION, REGIONS_END = 16, 17, 24, 26
#: The length of our fence words, as the agent expects it.
FENCE_NBYTES = 65536 * 8
#: Soft-RoCE has one budget of retries for all packets of a READ.
READ_NBYTES = 4096
READS = 16
#: Magic, kind, device, GID, LID, link layer, MTU, reads, queue pairs, fence words, sixteen queue pairs.
VERBS_HELLO = "<4sI64s16sHBBBBHQQII32I"


def text(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


class Reader:
    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def raw(self, nbytes: int) -> bytes:
        self._at += nbytes
        return self._body[self._at - nbytes : self._at]

    def number(self, form: str) -> int:
        return int(struct.unpack("<" + form, self.raw(struct.calcsize("<" + form)))[0])

    def table(self, item_nbytes: int = 1) -> bytes:
        return self.raw(self.number("I") * item_nbytes)


def siphash128(key: bytes, data: bytes) -> bytes:
    """SipHash-2-4 with a result of 128 bits."""
    mask = (1 << 64) - 1
    k0, k1 = struct.unpack("<QQ", key)
    v = [
        0x736F6D6570736575 ^ k0,
        0x646F72616E646F6D ^ k1 ^ 0xEE,
        0x6C7967656E657261 ^ k0,
        0x7465646279746573 ^ k1,
    ]

    def turned(value: int, bits: int) -> int:
        return (value << bits | value >> 64 - bits) & mask

    def rounds(num: int) -> None:
        for _ in range(num):
            v[0] = v[0] + v[1] & mask
            v[1] = turned(v[1], 13) ^ v[0]
            v[0] = turned(v[0], 32)
            v[2] = v[2] + v[3] & mask
            v[3] = turned(v[3], 16) ^ v[2]
            v[0] = v[0] + v[3] & mask
            v[3] = turned(v[3], 21) ^ v[0]
            v[2] = v[2] + v[1] & mask
            v[1] = turned(v[1], 17) ^ v[2]
            v[2] = turned(v[2], 32)

    whole = len(data) // 8 * 8
    last = data[whole:].ljust(7, b"\0") + bytes([len(data) & 255])
    for (word,) in struct.iter_unpack("<Q", data[:whole] + last):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    out = b""
    for place, mark in ((2, 0xEE), (1, 0xDD)):
        v[place] ^= mark
        rounds(4)
        out += struct.pack("<Q", v[0] ^ v[1] ^ v[2] ^ v[3])
    return out


def receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not more:
            raise ConnectionError("the agent hung up")
        data += more
    return data


class Control:
    """A session with the agent: frames are numbered, and sealed once both ends have proved themselves."""

    def __init__(self, port: int, secret: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._secret = secret
        self._sent = self._received = 0
        self._send_key = self._receive_key = b""
        self._lock = threading.Lock()
        self.regions: list[bytes] = []

    def send(self, kind: int, body: bytes) -> None:
        with self._lock:
            frame = struct.pack("<IHHQ", len(body), kind, 0, self._sent) + body
            self._sent += 1
            seal = siphash128(self._send_key, frame) if self._send_key else bytes(16)
            self._socket.sendall(frame + seal)

    def next(self) -> tuple[int, bytes]:
        header = receive(self._socket, 16)
        nbytes, kind, _, number = struct.unpack("<IHHQ", header)
        body, seal = receive(self._socket, nbytes), receive(self._socket, 16)
        assert number == self._received, (number, self._received)
        assert seal == (siphash128(self._receive_key, header + body) if self._receive_key else bytes(16))
        self._received += 1
        return kind, body

    def shake_hands(self) -> None:
        identity = (
            text(b"independent") + os.urandom(16 * 3) + text(b"") + struct.pack("<I", 1) + text(b"verbs")
        )
        hello = struct.pack("<HH", VERSION, VERSION) + os.urandom(32) + identity + text(b"")
        self.send(HELLO, hello)
        kind, challenge = self.next()
        assert kind == CHALLENGE, kind
        transcript = hashlib.sha256(hello + challenge[:-32]).digest()

        def prove(label: bytes) -> bytes:
            return hmac.new(self._secret, b"kvxfer/1 " + label + transcript, "sha256").digest()

        assert challenge[-32:] == prove(b"acceptor"), "the agent has another secret"
        self.session = challenge[-48:-32]
        self.send(PROOF, prove(b"initiator"))
        self._send_key, self._receive_key = prove(b"keys i->r")[:16], prove(b"keys r->i")[:16]
        self.rails_key = prove(b"keys rails")
        self.send(REGIONS_END, b"")

    def hear_regions(self) -> None:
        while (frame := self.next())[0] != REGIONS_END:
            self._heed(*frame)
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        while True:
            self._heed(*self.next())

    def _heed(self, kind: int, body: bytes) -> None:
        if kind == HEARTBEAT:
            self.send(HEARTBEAT_ACK, body)
        elif kind == REGION:
            self.regions.append(body)


def spans_of(region: bytes) -> list[tuple[int, int, int]]:
    """Returns address, length and remote key of each part of a REGION, from its verbs keys."""
    told = Reader(region)
    told.number("Q")  # id
    told.table()  # name
    told.number("Q")  # base
    told.table(16)  # spans
    told.number("I")  # blocks
    told.table()  # layout
    for _ in range(told.number("I")):
        transport, _, keys = told.table(), told.number("H"), told.table()
        if transport == b"verbs":
            assert keys[:4] == b"kvv1"
            return [
                (address, nbytes, key)
                for _, nbytes, address, key, _ in struct.iter_unpack("<QQQII", keys[8:])
            ]
    raise LookupError("the region has no keys for verbs")


class Rail:
    """A queue pair that is connected to one of the agent's."""

    def __init__(self, port: int, control: Control) -> None:
        self._context = Context(name=DEVICE)
        self._domain = PD(self._context)
        self._completions = CQ(self._context, READS, None, None)
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
        self._words = MR(self._domain, FENCE_NBYTES, access)
        self._page = MR(self._domain, READS * READ_NBYTES, access)
        wanted = QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=QPCap(max_send_wr=READS)
        )
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_READ
        self._pair = QP(self._domain, wanted, attributes)
        self._join(port, control)
        self._shake_hands(attributes)

    def _join(self, port: int, control: Control) -> None:
        """Proves that the socket is a rail of the session: index 0, first life, instance 0."""
        self._socket = socket.create_connection(("127.0.0.1", port))
        name = struct.pack("<HHI", 0, 0, 0)

        def prove(label: bytes, transport: bytes) -> bytes:
            proved = b"kvxfer/1 rail " + label + control.session + name + transport
            return hmac.new(control.rails_key, proved, "sha256").digest()

        body = control.session + struct.pack("<HI", 0, 0) + text(b"verbs") + struct.pack("<H", 0)
        body += prove(b"hello", b"verbs")
        self._socket.sendall(struct.pack("<IHHQ", len(body), RAIL_HELLO, 0, 0) + body + bytes(16))
        nbytes, kind, _, _ = struct.unpack("<IHHQ", receive(self._socket, 16))
        assert kind == RAIL_WELCOME, kind
        welcome = receive(self._socket, nbytes + 16)
        assert welcome[2:34] == prove(b"welcome", b"")

    def _shake_hands(self, attributes: QPAttr) -> None:
        gid = self._context.query_gid(1, GID_INDEX)
        pairs = [self._pair.qp_num, 7] + [0] * 30
        ours = struct.pack(
            VERBS_HELLO, b"kvr1", 1, DEVICE.encode(), bytes.fromhex(str(gid.gid).replace(":", "")),
            0, 2, e.IBV_MTU_1024, READS, 1, 0, self._words.buf, FENCE_NBYTES, self._words.rkey, 0, *pairs,
        )  # fmt: skip
        self._socket.sendall(ours)
        theirs = struct.unpack(VERBS_HELLO, receive(self._socket, len(ours)))
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = theirs[14], theirs[15], 7
        attributes.path_mtu = min(theirs[6], e.IBV_MTU_1024)
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = READS
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry, attributes.min_rnr_timer = (
            16,
            6,
            6,
            12,
        )
        digits = theirs[3].hex()
        there = GID(":".join(digits[at : at + 4] for at in range(0, 32, 4)))
        route = GlobalRoute(dgid=there, sgid_index=GID_INDEX)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self._pair.to_rts(attributes)
        ready = struct.pack("<4sI", b"kvr1", 2).ljust(len(ours), b"\0")
        self._socket.sendall(ready)
        assert receive(self._socket, len(ours))[:8] == ready[:8]

    def _post(self, operation: int, index: int, address: int, nbytes: int, key: int) -> None:
        here = SGE(self._page.buf + index * READ_NBYTES, nbytes, self._page.lkey)
        work = SendWR(opcode=operation, num_sge=1, sg=[here])
        work.set_wr_rdma(key, address)
        self._pair.post_send(work)

    def _completed(self, num: int) -> list[int]:
        statuses: list[int] = []
        give_up = time.monotonic() + 60
        while len(statuses) < num:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{len(statuses)} of {num} requests completed")
            statuses += [work.status for work in self._completions.poll(READS)[1]]
        return statuses

    def read(self, address: int, nbytes: int, key: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            sizes = [min(READ_NBYTES, nbytes - len(data) - at * READ_NBYTES) for at in range(READS)]
            sizes = [size for size in sizes if size > 0]
            for index, size in enumerate(sizes):
                self._post(e.IBV_WR_RDMA_READ, index, address + len(data) + index * READ_NBYTES, size, key)
            assert set(self._completed(len(sizes))) == {e.IBV_WC_SUCCESS}
            data += self._page.read(sum(sizes), 0)
        return data

    def write(self, address: int, key: int) -> int:
        self._post(e.IBV_WR_RDMA_WRITE, 0, address, READ_NBYTES, key)
        return self._completed(1)[0]


def main(port: int, secret: bytes) -> None:
    control = Control(port, secret)
    control.shake_hands()
    control.hear_regions()
    spans = spans_of(control.regions[0])
    rail = Rail(port, control)
    print("read", hashlib.sha256(b"".join(rail.read(*span) for span in spans)).hexdigest())
    address, _, key = spans[0]
    words = {
        value: name for name, value in vars(e).items() if name.startswith("IBV_WC_") and name.endswith("ERR")
    }
    print("write", words.get(rail.write(address, key), "succeeded"))


if __name__ == "__main__":
    main(int(sys.argv[1]), bytes.fromhex(sys.argv[2]))
